// Where the KV of a prompt's tokens came from.

const NAMES = { device: "on the device", host: "in host memory", disk: "on disk", computed: "computed" };

/** Draws a bar and says it in words; hides both where nothing is known. `cached`: tokens by tier. */
export function showSources(box, promptTokens, cached) {
  box.hidden = !promptTokens || !cached;
  if (box.hidden) return;
  const found = Object.values(cached).reduce((sum, tokens) => sum + tokens, 0);
  const tokens = { ...cached, computed: promptTokens - found };
  for (const source of Object.keys(NAMES)) {
    const count = tokens[source] ?? 0;
    const part = box.querySelector(`.sources .${source}`);
    const line = box.querySelector(`[data-source=${source}]`);
    part.hidden = line.hidden = !count;
    part.style.flexGrow = String(count);
    line.querySelector("span").textContent = `${count} ${NAMES[source]}`;
  }
}
