// A client of the control plane in another language: describe, open a session, admit a prompt.
// There is no kvplane library here, only the .proto files.

import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const ADDRESS = process.argv[2] ?? "127.0.0.1:50051";
const TIMEOUT_MS = 10_000;
const protos = fileURLToPath(new URL("../../protos", import.meta.url));

const definition = protoLoader.loadSync("kvplane/v1/control.proto", {
  includeDirs: [protos],
  keepCase: true,
  defaults: true, // a field that is 0 is not sent
  longs: String, // incarnations are 64 bits wide, JavaScript's numbers 53
  enums: String,
});
const { ControlPlaneService } = grpc.loadPackageDefinition(definition).kvplane.v1;
const stub = new ControlPlaneService(ADDRESS, grpc.credentials.createInsecure());

/** Calls one method; every call has a deadline. Errors carry `code` and `details`. */
function call(method, request) {
  const deadline = { deadline: Date.now() + TIMEOUT_MS };
  return promisify(stub[method].bind(stub))(request, new grpc.Metadata(), deadline);
}

/** A column is bytes: on a little-endian machine, those of an Int32Array or a BigInt64Array. */
function column(array) {
  return Buffer.from(array.buffer, array.byteOffset, array.byteLength);
}
function int32(values) {
  return column(Int32Array.from(values));
}
function int64(values) {
  return column(BigInt64Array.from(values, BigInt));
}
/** The elements of an int32 column. A Buffer may begin anywhere in its memory, so it is copied. */
function fromInt32(bytes) {
  return new Int32Array(Uint8Array.from(bytes).buffer);
}

async function main() {
  const plane = await call("DescribeControlPlane", {});
  console.log(`control plane ${plane.version}, incarnation ${plane.incarnation}`);

  const { pool_ids: poolIds } = await call("ListPools", {});
  if (poolIds.length === 0) throw new Error("no pool has registered");
  const pool = await call("DescribePool", { pool_id: poolIds[0] });
  console.log(`pool ${poolIds[0]}: shards ${pool.shards.length}, ready ${pool.ready}`);

  const opened = await call("OpenSession", {
    pool_id: poolIds[0],
    protocol: { oldest: 2, newest: 2 },
    layout: { fingerprint: pool.layout.fingerprint },
    client_name: "node example",
  });
  const { session } = opened; // an incarnation and an id, as strings: it goes with every request
  console.log(`session ${session.session_id}: ${opened.num_device_blocks} blocks in the pool`);

  let number = 0; // every request that changes the session has the next number
  async function run(operations) {
    number += 1;
    return (await call("RunStep", { step: { session, number, operations } })).result;
  }

  const tokenIds = Array.from({ length: 40 }, (_, i) => i);
  const admit = {
    sequence_id: 1,
    token_ids: int32(tokenIds),
    num_compute_tokens: 0,
    max_total_tokens: 48,
  };
  const admitted = done(await run([{ admit }])).admit;
  console.log(`admitted ${tokenIds.length} tokens: ${admitted.num_cached_tokens} cached`);

  const first = Number(admitted.num_cached_tokens);
  const append = {
    sequence_ids: int64([1]),
    first_positions: int64([first]),
    num_slots: int32([tokenIds.length + 1 - first]),
    num_tokens: int32([1]),
    token_ids: int32([7]),
  };
  const result = await run([{ append }]);
  const [blocks] = fromInt32(done(result).append.num_blocks);
  console.log(`appended a token: ${blocks} blocks`);
  console.log(`the plan for the data plane takes ${result.plan.payload.length} bytes`);

  await call("CloseSession", { session });
}

/** The one operation's result. An item that was not done has a status and an error or shortage. */
function done(result) {
  const [operation] = result.results;
  for (const { status, error, shortage } of operation.failures) {
    const short = shortage && `${shortage.num_blocks_needed} blocks needed`;
    throw new Error(`${status}: ${error?.message ?? short}`);
  }
  return operation;
}

main()
  .catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  })
  .finally(() => stub.close());
