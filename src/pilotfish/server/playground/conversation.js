// What was said in a chat so far, and how it is shown.

import { TokenText } from "./tokens.js";

/** Turns of a question and an answer. Of an answer its `content` goes into the next request: what is shown of it may be
 * more, reasoning for example. */
export class Conversation {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.turns = []; // {question, content, element}
    this.element.replaceChildren();
  }

  /** What a request says that asks `question`. */
  messages(system, question) {
    const said = this.turns.flatMap((turn) => [message("user", turn.question), message("assistant", turn.content)]);
    return [...(system ? [message("system", system)] : []), ...said, message("user", question)];
  }

  /** Shows a question below the turns before it. Returns where the answer's tokens are to be written. */
  ask(question) {
    if (!this.turns.length) this.clear();
    const parts = [part("h2", "You"), part("p", question), part("h2", "Model"), part("div", "")];
    const element = document.createElement("section");
    element.append(...parts);
    this.element.append(element);
    this.element.scrollTop = this.element.scrollHeight;
    this.turns.push({ question, content: "", element });
    return new TokenText(parts.at(-1));
  }

  /** More of the last answer's content. */
  add(content) {
    this.turns.at(-1).content += content;
  }

  /** Forgets the last question, to which nothing was said, and returns it. */
  takeBack() {
    const { question, element } = this.turns.pop();
    element.remove();
    return question;
  }
}

function message(role, content) {
  return { role, content };
}

function part(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}
