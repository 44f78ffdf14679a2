// What an answer's chunks tell of its speculation and its pace.

/** Sums over one answer. Times are milliseconds of the page's clock. */
export class Figures {
  constructor(began) {
    this.began = began;
    this.first = null; // when the first token came
    this.firstTokens = 0; // that came at that time
    this.last = began;
    this.tokens = 0;
    this.verified = []; // one a verify step: {at, tokens, nodes, accepted}
  }

  /** A chunk that brought `tokens` tokens at time `now`. */
  add(tokens, verified, now) {
    if (!tokens) return;
    if (this.first === null) {
      this.first = now;
      this.firstTokens = tokens;
    }
    this.last = now;
    this.tokens += tokens;
    this.verified.push(...verified);
  }

  get nodes() {
    return this.verified.reduce((sum, one) => sum + one.nodes, 0);
  }

  get accepted() {
    return this.verified.reduce((sum, one) => sum + one.accepted, 0);
  }

  /** Tokens a second after the first ones; null while there are none. */
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return this.tokens > this.firstTokens && seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }
}

const NONE = "–";

function set(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

export function showFigures(figures) {
  const { nodes, accepted, verified, tokens, rate, first, began } = figures;
  const steps = verified.length;
  set("acceptance", nodes ? `${((100 * accepted) / nodes).toFixed(0)} %` : NONE);
  set("acceptance-note", nodes ? `${accepted} of ${nodes} nodes` : "of the nodes verified");
  set("per-step", steps ? (tokens / steps).toFixed(2) : NONE);
  set("per-step-note", steps ? `${tokens} in ${steps} steps` : "one without speculation");
  set("rate", rate === null ? NONE : rate.toFixed(1));
  set("first", first === null ? NONE : `${(first - began).toFixed(0)} ms`);
  set("nodes", steps ? `${(nodes / steps).toFixed(1)}` : NONE);
}

export function treesSummary(figures) {
  const sizes = figures.verified.map((one) => one.nodes);
  if (!sizes.length) return "No steps yet";
  return `Tree sizes of ${sizes.length} verify steps: ${Math.min(...sizes)} to ${Math.max(...sizes)} nodes, ` +
    `${figures.accepted} of ${figures.nodes} nodes accepted`;
}
