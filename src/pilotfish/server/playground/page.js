// The page: a form becomes a request, an answer's chunks become text, figures and drawings.

import { drawTimeline, drawTrees, Timeline } from "./charts.js";
import { Figures, showFigures, treesSummary } from "./figures.js";
import { showPools } from "./pools.js";
import { showSources } from "./sources.js";
import { chunks, modelName } from "./stream.js";
import { TokenText } from "./tokens.js";

const KEY = "pilotfish.key"; // in sessionStorage
const CALM = window.matchMedia("(prefers-reduced-motion: reduce)");
const at = (id) => document.getElementById(id);

const form = at("request");
const output = at("output");
const text = new TokenText(output);
let figures = new Figures(0);
let timeline = new Timeline();
let prefills = false; // whether a prefill worker has handed KV over, in this answer or before
let model = null; // its name, once the server has told it
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

/** The body of a request. What is left empty is left out, so that the server's defaults hold. */
function body() {
  const chat = endpoint() === "chat";
  const prompt = at("prompt").value;
  return {
    model,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
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
  model = await modelName(at("key").value);
  at("model").textContent = model;
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
  begin();
  try {
    await learnModel();
    const path = endpoint() === "chat" ? "v1/chat/completions" : "v1/completions";
    end(await read(chunks(path, body(), at("key").value, running.signal)));
  } catch (error) {
    if (running.signal.aborted) end({ reason: "stopped" });
    else fail(error);
  } finally {
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
    // what the model wrote: of a chat's content its reasoning is left out
    if (choice) show(chunk.pilotfish?.text ?? choice.text ?? choice.delta?.content ?? "", chunk.pilotfish);
  }
  return ending;
}

// What is seen

function begin() {
  figures = new Figures(performance.now());
  timeline = new Timeline();
  text.clear();
  at("error").hidden = at("sources").hidden = true;
  at("status").textContent = "Waiting for the first token.";
  busy(true);
  draw();
  output.scrollIntoView({ block: "nearest", behavior: CALM.matches ? "auto" : "smooth" });
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
  at("run").setAttribute("aria-disabled", String(is));
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
    form.requestSubmit();
  }
});
form.addEventListener("invalid", () => (at("parameters").open = true), true); // or nobody sees why nothing runs
form.addEventListener("change", () => {
  at("prompt-label").textContent = endpoint() === "chat" ? "Message" : "Prompt";
});
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
