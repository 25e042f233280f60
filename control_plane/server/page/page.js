// Draws what /events tells. Text from the pools is only ever set as text.
"use strict";

const STATES = ["free", "cached", "retired", "pinned", "held"];
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

function table(names, rows) {
  const head = element("tr", "", ...names.map((name) => element("th", "", name)));
  return element("table", "", head, ...rows);
}

function row(...values) {
  return element("tr", "", ...values.map((value) => element("td", "", value)));
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

function poolBox(pool) {
  const box = element("section", "pool");
  box.id = `pool-${pool.id}`;
  const { num_lookup_tokens: looked, num_hit_tokens: hit } = pool;
  const share = looked ? ` (${((100 * hit) / looked).toFixed(1)} %)` : "";
  const facts = [
    pool.model,
    pool.ready ? "ready" : "not ready",
    `blocks of ${pool.block_size_tokens} tokens`,
    `${number(hit)} of ${number(looked)} tokens found cached${share}`,
    `evictions: ${number(pool.num_evictions)}`,
    `sessions: ${number(pool.num_sessions)}, sequences: ${number(pool.num_sequences)}`,
  ];
  const head = element("div", "head", element("h2", "", pool.id), element("span", "faint", facts.join(" \u00b7 ")));
  const maps = element("div", "maps", ...pool.maps.filter((map) => map.num_blocks).map(blockMap));
  box.append(head, maps, element("h3", "", "Sessions and their sequences"));
  const rows = pool.sessions.flatMap((session) => [
    row(session.id, "", number(session.num_sequences), number(session.num_held_blocks)),
    ...session.sequences.map((each) =>
      row("", each.id, "", number(each.num_blocks), number(each.num_tokens), number(each.num_cached_tokens), each.tier),
    ),
  ]);
  const names = ["session", "sequence", "sequences", "blocks", "tokens", "found cached", "tier"];
  box.append(rows.length ? table(names, rows) : element("p", "none", "None is open."));
  return box;
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
  const view = JSON.parse(event.data);
  linked(true);
  document.getElementById("plane").textContent = `version ${view.version}, incarnation ${view.incarnation}`;
  const none = element("p", "none", "No pool has registered.");
  document.getElementById("pools").replaceChildren(...(view.pools.length ? view.pools.map(poolBox) : [none]));
};
