import { connect, zeros } from "./kvplane.js";

const [address, source] = process.argv.slice(2);

const control = await connect("SessionService", address, source);
const pools = await connect("PoolService", address, source);
const { layout } = await pools.call("GetPool", { pool_id: "default" });
const opened = await control.call("OpenSession", { pool_id: "default", layout: { fingerprint: layout.fingerprint } });
const { session, grant, shards } = opened;
const admit = { sequence_id: 1, token_ids: [97, 98, 99] };
const { plan } = await control.call("Step", { session, number: 1, operations: [{ admit }] });

const data = await connect("ExecutionService", shards[0].address, source);
const execution = data.stream("Execute");
const { layers } = (await execution.ask({ open: { grant } })).opened;
const { plan_number, num_tokens } = (await execution.ask({ plan: { plan } })).started;
const [{ num_kv_heads, head_size }] = layout.groups;
const qkv = zeros(num_tokens, num_kv_heads, head_size);
let receipt; // comes with the last layer
for (const layer of layers) {
  const { output } = await execution.ask({ layer: { layer, plan_number, query: qkv, key: qkv, value: qkv } });
  console.log(`layer ${layer}: attention [${output.output.shape}]`);
  receipt = output.receipt;
}
execution.end();

const free = { sequence_ids: [1] };
await control.call("Step", { session, number: 2, operations: [{ free }], receipts: [receipt] });
await control.call("CloseSession", { session });
for (const plane of [control, pools, data]) plane.close();
