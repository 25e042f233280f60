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
  longs: String, // ids are 64 bits wide, JavaScript's numbers 53
});
const { ControlPlaneService } = grpc.loadPackageDefinition(definition).kvplane.v1;
const stub = new ControlPlaneService(ADDRESS, grpc.credentials.createInsecure());

/** Calls one method; every call has a deadline. Errors carry `code` and `details`. */
function call(method, request) {
  const deadline = { deadline: Date.now() + TIMEOUT_MS };
  return promisify(stub[method].bind(stub))(request, new grpc.Metadata(), deadline);
}

/** Token ids travel as packed little-endian int32 values. */
function packTokens(tokenIds) {
  const bytes = Buffer.alloc(4 * tokenIds.length);
  tokenIds.forEach((token, i) => bytes.writeInt32LE(token, 4 * i));
  return bytes;
}

async function main() {
  const plane = await call("DescribeControlPlane", {});
  console.log(`control plane ${plane.version}, incarnation ${plane.incarnation}`);

  const { pool_ids: poolIds } = await call("ListPools", {});
  if (poolIds.length === 0) throw new Error("no pool has registered");
  const pool = await call("DescribePool", { pool_id: poolIds[0] });
  console.log(`pool ${poolIds[0]}: ${pool.shards.length} shard, ready: ${pool.ready}`);

  const session = await call("OpenSession", {
    pool_id: poolIds[0],
    protocol: { oldest: 1, newest: 1 },
    layout: { fingerprint: pool.layout.fingerprint },
    client_name: "node example",
  });
  console.log(`session ${session.session_id}: ${session.num_device_blocks} blocks in the pool`);

  const tokenIds = Array.from({ length: 40 }, (_, i) => i);
  const admitted = await call("Admit", {
    session_id: session.session_id,
    number: 1,
    operation: { sequence_id: 1, token_ids: packTokens(tokenIds) },
  });
  const { num_cached_tokens: cached, num_blocks: blocks } = admitted.result;
  console.log(`admitted ${tokenIds.length} tokens: ${cached} cached, ${blocks} blocks`);
  console.log(`the plan for the data plane takes ${admitted.plan.payload.length} bytes`);

  await call("CloseSession", { session_id: session.session_id });
}

main()
  .catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  })
  .finally(() => stub.close());
