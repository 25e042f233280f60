// A session in Node, with the messages of protos/ and nothing else of kvplane.
//     node session.js HOST:PORT
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const files = ["pool", "session", "execution"].map((name) => `kvplane/v1/${name}.proto`);
const { kvplane } = grpc.loadPackageDefinition(
  protoLoader.loadSync(files, {
    includeDirs: [fileURLToPath(new URL("../../protos", import.meta.url))],
    keepCase: true,
    defaults: true, // a field that is 0 is not sent
    longs: String, // incarnations are 64 bits wide, JavaScript's numbers 53
    enums: String,
    oneofs: true,
  }),
);

const connect = (service, address) => new kvplane.v1[service](address, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 10_000 });
const call = (plane, method, request) =>
  promisify(plane[method].bind(plane))(request, new grpc.Metadata(), deadline());

const pools = connect("PoolService", process.argv[2]);
const control = connect("SessionService", process.argv[2]);
const { layout } = await call(pools, "GetPool", { pool_id: "default" });
const opening = { pool_id: "default", layout: { fingerprint: layout.fingerprint } };
const { session, grant, shards } = await call(control, "OpenSession", opening);
const admit = { sequence_id: 1, token_ids: [97, 98, 99] };
const { plan } = await call(control, "Step", { session, number: 1, operations: [{ admit }] });

const data = connect("ExecutionService", shards[0].address);
const execution = data.Execute(deadline());
const answers = execution[Symbol.asyncIterator]();
async function ask(request) {
  execution.write(request);
  const { value } = await answers.next();
  if (value?.error) throw new Error(JSON.stringify(value.error));
  return value;
}
const { layers } = (await ask({ open: { grant } })).opened;
const { plan_number, num_tokens } = (await ask({ plan: { plan } })).started;
const { num_kv_heads, head_size } = layout.groups[0];
const shape = [num_tokens, num_kv_heads, head_size];
const item_bytes = layout.dtype === "ELEMENT_TYPE_FLOAT32" ? 4 : 2;
const zeros = Buffer.alloc(item_bytes * num_tokens * num_kv_heads * head_size);
const qkv = { dtype: layout.dtype, shape, data: zeros };
let receipt; // comes with the last layer
for (const layer of layers) {
  const { output } = await ask({ layer: { layer, plan_number, query: qkv, key: qkv, value: qkv } });
  console.log(`layer ${layer}: attention [${output.output.shape}]`);
  receipt = output.receipt;
}
execution.end();

const free = { sequence_ids: [1] };
await call(control, "Step", { session, number: 2, operations: [{ free }], receipts: [receipt] });
await call(control, "CloseSession", { session });
for (const plane of [pools, control, data]) plane.close();
