// Draws what /events tells. Text from the pools is only ever set as text.
"use strict";

const STATES = ["free", "cached", "retired", "pinned", "held"];
const MAX_RUNS = 300;
const style = getComputedStyle(document.documentElement);
const colours = STATES.map((state) => style.getPropertyValue(`--${state}`).trim());

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function number(value) {
  return value.toLocaleString("en");
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function table(names, rows) {
  const head = element("tr", "", ...names.map((name) => element("th", "", name)));
  return element("table", "", head, ...rows);
}

function row(...values) {
  return element("tr", "", ...values.map((value) => (value instanceof Node ? value : element("td", "", String(value)))));
}

/** A square for each cell, in the colour of its state. */
function blockMap(map) {
  const numCells = map.cells.length;
  const numColumns = Math.min(64, Math.max(1, numCells));
  const size = numCells <= 512 ? 12 : 8;
  const canvas = element("canvas");
  canvas.width = numColumns * size;
  canvas.height = Math.max(1, Math.ceil(numCells / numColumns)) * size;
  const context = canvas.getContext("2d");
  for (let i = 0; i < numCells; ++i) {
    context.fillStyle = colours[Number(map.cells[i])];
    context.fillRect((i % numColumns) * size, Math.floor(i / numColumns) * size, size - 1, size - 1);
  }
  canvas.title = "block 0 is at the top left";
  const legend = element("div", "legend");
  for (const [state, num] of Object.entries(map.num_in)) {
    const shown = state === "held" && map.cells.includes("3") ? `${state}, pinned` : state;
    legend.append(element("span", "", element("i", state), `${shown} ${number(num)}`));
  }
  const title = `${map.group}, ${map.tier} tier: ${number(map.num_blocks)} blocks`;
  const scale = map.blocks_per_cell > 1 ? `, ${map.blocks_per_cell} a square` : "";
  return element("div", "map", element("h3", "", title + scale), legend, canvas);
}

/** Runs of cached blocks, indented below those that they continue. */
function prefixTree(poolId, tree, now) {
  const box = element("div", "tree");
  box.dataset.name = `${poolId}/${tree.namespace}`;
  const below = new Map();
  tree.runs.forEach((run, i) => {
    if (!below.has(run.parent)) below.set(run.parent, []);
    below.get(run.parent).push(i);
  });
  const order = [];
  const waiting = (below.get(-1) ?? []).map((i) => [i, 0]).reverse();
  while (waiting.length && order.length < MAX_RUNS) {
    const [i, depth] = waiting.pop();
    order.push([i, depth]);
    waiting.push(...(below.get(i) ?? []).map((child) => [child, depth + 1]).reverse());
  }
  for (const [i, depth] of order) {
    const run = tree.runs[i];
    const line = element("div", "run");
    line.style.paddingLeft = `${1.2 * depth}rem`;
    for (const [num, kind] of [[run.num_device_blocks, "bar"], [run.num_host_blocks, "bar host"]]) {
      const bar = element("span", kind);
      bar.style.width = `${Math.min(240, 4 * num)}px`;
      if (num) line.append(bar);
    }
    const places = [`${number(run.num_device_blocks)} on the device`];
    if (run.num_host_blocks) places.push(`${number(run.num_host_blocks)} on the host`);
    const told = `${places.join(", ")}; ${number(run.num_hits)} hits; ${duration(now - run.published_s)} old, idle ${duration(now - run.used_s)}`;
    line.append(element("span", "", told), element("code", "", run.hash.slice(0, 12)));
    box.append(line);
  }
  const name = tree.namespace === "" ? "Prefixes" : `Prefixes of namespace ${tree.namespace}`;
  const more = tree.is_whole && order.length === tree.runs.length ? "" : ", the first of them";
  const title = element("h3", "", `${name}: ${number(tree.runs.length)} runs of blocks${more}`);
  return element("section", "prefixes", title, tree.runs.length ? box : element("p", "none", "Nothing is cached."));
}

function sessionTable(sessions) {
  const rows = [];
  for (const session of sessions) {
    rows.push(
      row(session.id, number(session.num_sequences), number(session.num_held_blocks), session.num_plans_in_flight, session.last_number),
    );
  }
  return table(["session", "sequences", "blocks held", "plans in flight", "last step"], rows);
}

function sequenceTable(sessions) {
  const rows = sessions.flatMap((session) =>
    session.sequences.map((each) =>
      row(
        each.id,
        session.id,
        number(each.num_tokens),
        number(each.num_written_tokens),
        number(each.num_cached_tokens),
        each.tier,
        element("td", "table", each.table.join(" ")),
      ),
    ),
  );
  return table(["sequence", "session", "tokens", "written", "found cached", "tier", "blocks"], rows);
}

function poolBox(pool, now) {
  const box = element("section", "pool");
  box.id = `pool-${pool.id}`;
  const { num_lookup_tokens: looked, num_hit_tokens: hit } = pool.counters;
  const share = Number(looked) ? ` (${((100 * Number(hit)) / Number(looked)).toFixed(1)} %)` : "";
  const facts = [
    pool.ready ? "ready" : "not ready",
    `${pool.shards.filter((shard) => shard.connected).length} of ${pool.shards.length} shards connected`,
    `blocks of ${pool.block_size_tokens} tokens`,
    `${number(Number(hit))} of ${number(Number(looked))} tokens found cached${share}`,
    `sessions: ${number(pool.num_sessions)}, sequences: ${number(pool.num_sequences)}`,
  ];
  const head = element("div", "head", element("h2", "", pool.id), element("span", "faint", [pool.model, ...facts].join(" \u00b7 ")));
  const maps = element("div", "maps", ...pool.maps.filter((map) => map.num_blocks).map(blockMap));
  box.append(head, maps, ...pool.prefixes.map((tree) => prefixTree(pool.id, tree, now)));
  if (pool.sessions.length) {
    box.append(element("h3", "", "Sessions"), sessionTable(pool.sessions));
    box.append(element("h3", "", "Sequences"), sequenceTable(pool.sessions));
  } else {
    box.append(element("h3", "", "Sessions"), element("p", "none", "None is open."));
  }
  return box;
}

/** Where each tree is scrolled to, which drawing it again would forget. */
function places() {
  return new Map([...document.querySelectorAll(".tree")].map((tree) => [tree.dataset.name, tree.scrollTop]));
}

let told = null; // the last event, and when it came

function draw() {
  if (told === null) return;
  const { view, came_ms: came } = told;
  const now = view.now_s + (performance.now() - came) / 1000;
  document.getElementById("plane").textContent = `version ${view.version}, incarnation ${view.incarnation}`;
  const none = element("p", "none", "No pool has registered.");
  const boxes = view.pools.map((pool) => poolBox(pool, now));
  const scrolled = places();
  document.getElementById("pools").replaceChildren(...(boxes.length ? boxes : [none]));
  for (const tree of document.querySelectorAll(".tree")) tree.scrollTop = scrolled.get(tree.dataset.name) ?? 0;
}

function linked(isOn) {
  const link = document.getElementById("link");
  link.className = isOn ? "on" : "off";
  link.textContent = isOn ? "live" : "not connected";
}

const events = new EventSource("events");
events.onopen = () => linked(true);
events.onerror = () => linked(false); // it connects again by itself
events.onmessage = (event) => {
  told = { view: JSON.parse(event.data), came_ms: performance.now() };
  linked(true);
  draw();
};
setInterval(draw, 5000); // ages grow
