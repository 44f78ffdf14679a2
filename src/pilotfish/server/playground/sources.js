// Where the KV of a prompt's tokens came from.

const NAMES = { device: "on the device", host: "in host memory", disk: "on disk", prefill: "from a prefill worker", computed: "computed" };

/** Draws a bar and says it in words; hides both where nothing is known. `cached`: tokens by tier; `handedOver`:
 * tokens that prefill workers computed, of a sequence that began twice more than its prompt has. */
export function showSources(box, promptTokens, cached, handedOver = 0) {
  box.hidden = !promptTokens || !cached;
  if (box.hidden) return;
  const found = Object.values(cached).reduce((sum, tokens) => sum + tokens, 0);
  const prefill = Math.min(handedOver, promptTokens - found);
  const tokens = { ...cached, prefill, computed: promptTokens - found - prefill };
  for (const source of Object.keys(NAMES)) {
    const count = tokens[source] ?? 0;
    const part = box.querySelector(`.sources .${source}`);
    const line = box.querySelector(`[data-source=${source}]`);
    part.hidden = line.hidden = !count;
    part.style.flexGrow = String(count);
    line.querySelector("span").textContent = `${count} ${NAMES[source]}`;
  }
}
