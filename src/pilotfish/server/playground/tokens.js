// An answer's text, cut into tokens that show who wrote them.

const TITLES = { drafted: "guessed by the draft, accepted", own: "the target’s own" };

/** Whether the draft guessed each of a chunk's tokens: the first `accepted` ones of every verified entry. */
function origins(detail) {
  const drafted = detail.verified.flatMap((one) => Array.from({ length: one.tokens }, (_, i) => i < one.accepted));
  return detail.tokens.map((_, i) => (drafted[i] ? "drafted" : "own"));
}

/** Writes an answer into an element. Its textContent is always the text received so far, exactly. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.characters = []; // code points: what `ends` counts
    this.spans = []; // one a token
    this.ends = [0]; // where each span begins, and the last one ends
    this.open = 0; // the first span whose text may be incomplete
    this.rest = document.createElement("span"); // text that belongs to no token known yet
    this.element.replaceChildren(this.rest);
  }

  /** `detail`: the `pilotfish` object that came with the text, if one did. Its `ends` may lie beyond the text. */
  add(text, detail) {
    for (const character of text) this.characters.push(character);
    if (detail) this.#append(detail);
    this.#fill();
  }

  #append(detail) {
    const names = origins(detail);
    const added = detail.tokens.map((token, i) => {
      const span = document.createElement("span");
      span.className = `token ${names[i]}`;
      span.title = `token ${token}: ${TITLES[names[i]]}`;
      return span;
    });
    this.spans.push(...added);
    this.ends.push(...detail.ends);
    this.rest.before(...added);
  }

  #fill() {
    const length = this.characters.length;
    for (let i = this.open; i < this.spans.length; i++) {
      const text = this.#between(this.ends[i], this.ends[i + 1]);
      if (this.spans[i].textContent !== text) this.spans[i].textContent = text;
    }
    while (this.open < this.spans.length && this.ends[this.open + 1] <= length) this.open++;
    this.rest.textContent = this.#between(this.ends.at(-1), length);
  }

  #between(start, end) {
    return this.characters.slice(start, Math.max(start, end)).join("");
  }
}
