// The draft pools that the server's targets know.

import { knownPools } from "./stream.js";

// Counts of what healthy drafts do.
const NORMAL = new Set(["late_nodes", "repeated_nodes", "stale_frames", "unknown_messages", "pauses"]);

/** Fills the table; hides it where there are no pools, or nobody may know of them. */
export async function showPools(section, key) {
  const pools = await knownPools(key).catch(() => []);
  section.hidden = pools.length === 0;
  section.querySelector("tbody").replaceChildren(...pools.map(row));
}

function row({ target, pool }) {
  const state = pool.refusal ? "refuses" : !pool.ready ? "silent" : pool.busy ? "busy" : "ready";
  const broken = Object.entries(pool.drops).filter(([reason, count]) => count && !NORMAL.has(reason));
  const cells = [
    state,
    pool.delay_ms === null ? "–" : `${pool.delay_ms.toFixed(2)} ms`,
    `${pool.step_ms.toFixed(2)} ms`,
    share(pool.drops.late_nodes ?? 0, pool.nodes),
    share(pool.accepted, pool.verified),
    pool.capabilities.join(", ") || "–",
    broken.map(([reason, count]) => `${reason} ${count}`).join(", ") || "none",
  ];
  const line = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = `${pool.name} of ${target}`;
  line.append(name, ...cells.map(cell));
  return line;
}

function cell(text) {
  const element = document.createElement("td");
  element.textContent = text;
  return element;
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}
