// The page: a form becomes a request, an answer's chunks become text, figures and drawings.

import { drawTimeline, drawTrees, Timeline } from "./charts.js";
import { Conversation } from "./conversation.js";
import { Figures, showFigures, treesSummary } from "./figures.js";
import { showPools } from "./pools.js";
import { showSources } from "./sources.js";
import { chunks, servedModel } from "./stream.js";
import { TokenText } from "./tokens.js";

const KEY = "pilotfish.key"; // in sessionStorage
const CALM = window.matchMedia("(prefers-reduced-motion: reduce)");
const at = (id) => document.getElementById(id);
const PATHS = { completions: "v1/completions", chat: "v1/chat/completions" };
/** What fields hold until somebody changes them, by endpoint. */
const PRESETS = {
  prompt: { completions: at("prompt").defaultValue, chat: "Why is the sky blue?" },
  "max-tokens": { completions: "128", chat: "1024" },
};

const form = at("request");
const output = at("output");
const conversation = new Conversation(output);
let text = new TokenText(output);
let figures = new Figures(0);
let timeline = new Timeline();
let prefills = false; // whether a prefill worker has handed KV over, in this answer or before
let model = null; // its name, once the server has told it
let chosen = false; // whether somebody has chosen the endpoint
let running = null; // the AbortController of the request that runs
let drawAt = 0; // a time before which nothing is drawn anew
let frame = 0; // the animation frame asked for

// Requests

function number(id) {
  return at(id).value === "" ? undefined : Number(at(id).value);
}

function endpoint() {
  return form.elements.endpoint.value;
}

function isChat() {
  return endpoint() === "chat";
}

/** The body of a request. What is left empty is left out, so that the server's defaults hold. */
function body() {
  const chat = isChat();
  const prompt = at("prompt").value;
  return {
    model,
    ...(chat ? { messages: conversation.messages(at("system").value, prompt) } : { prompt }),
    [chat ? "max_completion_tokens" : "max_tokens"]: number("max-tokens"),
    temperature: number("temperature"),
    seed: at("seed").value || undefined, // as text: a number would lose digits above 2^53
    stream: true,
    stream_options: { include_usage: true },
    speculation: {
      mode: at("mode").value || undefined,
      max_nodes: number("max-nodes"),
      metrics: "summary",
      detail: true,
    },
  };
}

async function learnModel() {
  if (model) return;
  const served = await servedModel(at("key").value);
  model = served.id;
  at("model").textContent = model;
  if (served.chat && !chosen) {
    form.elements.endpoint.value = "chat";
    suit();
  }
  await showPools(at("pools"), at("key").value);
}

/** Asks for the model's name before the first request does. */
async function greet() {
  if (running || model) return;
  const status = await learnModel().then(() => "Ready.", (error) => `Not ready: ${error.message}`);
  if (!running) at("status").textContent = status;
}

async function run() {
  if (running) return;
  running = new AbortController();
  busy(true);
  let open = false; // whether a question waits for its answer
  try {
    await learnModel();
    const answer = chunks(PATHS[endpoint()], body(), at("key").value, running.signal);
    open = isChat();
    begin();
    end(await read(answer));
    open = false;
  } catch (error) {
    if (running.signal.aborted) end({ reason: "stopped" });
    else fail(error);
  } finally {
    if (open && !text.characters.length) askAgain(conversation.takeBack());
    running.abort(); // after an error event the server may still hold the connection
    running = null;
    rest();
    if (model) showPools(at("pools"), at("key").value);
  }
}

/** Takes an answer in. Returns how it ended: {reason, seed, usage, cached, handedOver}. */
async function read(answer) {
  const ending = { reason: "ended" };
  for await (const chunk of answer) {
    const [choice] = chunk.choices;
    ending.seed ??= chunk.seed;
    ending.usage ??= chunk.usage;
    ending.cached ??= chunk.metrics?.cached_by_tier;
    ending.handedOver ??= chunk.metrics?.handed_over;
    ending.reason = choice?.finish_reason ?? ending.reason;
    if (choice?.delta?.content) conversation.add(choice.delta.content);
    // what the model wrote: of a chat's content its reasoning is left out
    if (choice) show(chunk.pilotfish?.text ?? choice.text ?? choice.delta?.content ?? "", chunk.pilotfish);
  }
  return ending;
}

// What is seen

function begin() {
  blank();
  if (isChat()) {
    text = conversation.ask(at("prompt").value);
    at("prompt").value = "";
  } else {
    conversation.clear();
    text = new TokenText(output);
  }
  at("status").textContent = "Waiting for the first token.";
  draw();
  output.scrollIntoView({ block: "nearest", behavior: CALM.matches ? "auto" : "smooth" });
}

/** Nothing is known of an answer. */
function blank() {
  figures = new Figures(performance.now());
  timeline = new Timeline();
  at("error").hidden = at("sources").hidden = true;
}

function beginAnew() {
  if (running) return;
  conversation.clear();
  blank();
  at("status").textContent = "Ready.";
  rest();
  at("prompt").focus();
}

/** Puts a question that was taken back where it came from, unless another one has been begun there. */
function askAgain(question) {
  at("prompt").value ||= question;
}

/** Fits the form to its endpoint. */
function suit() {
  for (const one of document.querySelectorAll("[data-endpoint]")) one.hidden = one.dataset.endpoint !== endpoint();
  at("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  at("prompt").required = isChat();
  for (const [id, presets] of Object.entries(PRESETS)) {
    if (Object.values(presets).includes(at(id).value)) at(id).value = presets[endpoint()];
  }
}

function show(added, detail) {
  const follows = output.scrollHeight - output.scrollTop - output.clientHeight < 24;
  if (figures.first === null && (added || detail?.tokens.length)) at("status").textContent = "Streaming.";
  text.add(added, detail);
  figures.add(detail?.tokens.length ?? 0, detail?.verified ?? [], performance.now());
  timeline.add(detail?.steps ?? [], detail?.handovers ?? []);
  prefills ||= timeline.handovers.length > 0;
  if (follows) output.scrollTop = output.scrollHeight;
  frame ||= requestAnimationFrame(animate);
}

/** Draws in the browser's pace, or twice a second where motion is unwanted. */
function animate(now) {
  frame = 0;
  if (now < drawAt) {
    if (running) frame = requestAnimationFrame(animate);
    return;
  }
  drawAt = now + (CALM.matches ? 500 : 0);
  draw();
}

function end({ reason, seed, usage, cached: byTier, handedOver }) {
  showSources(at("sources"), usage?.prompt_tokens, byTier, handedOver);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const prompt = usage ? ` · prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}` : "";
  const drawn = seed === undefined ? "" : ` · seed ${seed}`;
  at("status").textContent = `${usage?.completion_tokens ?? figures.tokens} tokens · ${reason}${drawn}${prompt}`;
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
  at("status").textContent = figures.tokens ? `${figures.tokens} tokens, then an error.` : "No answer.";
}

/** Everything as it stays until the next request. */
function rest() {
  busy(false);
  draw(true);
  at("summary").textContent = timeline.summary;
  at("timeline").setAttribute("aria-label", `Timeline. ${timeline.summary}`);
  at("trees").setAttribute("aria-label", treesSummary(figures));
}

function busy(is) {
  if (!is && document.activeElement === at("stop")) at("run").focus(); // a disabled button would lose the focus
  at("stop").disabled = !is;
  for (const id of ["run", "anew"]) at(id).setAttribute("aria-disabled", String(is));
  output.setAttribute("aria-busy", String(is));
}

/** All figures and drawings. `follow`: whether the timeline shows its end. */
function draw(follow = Boolean(running)) {
  const span = Number(at("span").value);
  const position = at("position");
  position.min = String(Math.min(span, timeline.end));
  position.max = String(timeline.end);
  if (follow) position.value = position.max;
  position.disabled = Boolean(running);
  position.hidden = timeline.end <= span;
  position.setAttribute("aria-valuetext", `up to ${Number(position.value).toFixed(1)} seconds`);
  at("timeline").classList.toggle("tall", prefills);
  for (const one of document.querySelectorAll("[data-role=prefill]")) one.hidden = !prefills;
  showFigures(figures);
  drawTrees(at("trees"), figures.verified);
  drawTimeline(at("timeline"), timeline, Math.max(span, Number(position.value)), span, prefills);
}

// Events

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!running) form.requestSubmit();
  }
});
at("parameters").addEventListener("invalid", () => (at("parameters").open = true), true); // or nobody sees why nothing runs
form.addEventListener("change", ({ target }) => {
  if (target.name !== "endpoint") return;
  chosen = true;
  suit();
});
at("anew").addEventListener("click", beginAnew);
at("key").addEventListener("input", () => sessionStorage.setItem(KEY, at("key").value));
at("key").addEventListener("change", greet);
at("span").addEventListener("change", () => draw());
at("position").addEventListener("input", () => draw());
window.addEventListener("resize", () => draw());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

at("parameters").open = window.matchMedia("(min-width: 60rem)").matches;
at("key").value = sessionStorage.getItem(KEY) ?? "";
draw();
greet();
