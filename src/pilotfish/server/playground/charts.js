// Two drawings on canvases: tree sizes, and a timeline of target, draft and prefill worker.

const LANES = { target: 8, draft: 56, prefill: 104, height: 36, left: 52 };
const STRIP = 9; // height of a transfer's strip in its lane
const TICKS = { 0.5: 0.1, 1: 0.2, 2: 0.5, 5: 1 }; // seconds between ticks, for each window

/** A canvas's context in CSS pixels, cleared, and the page's colours. */
function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  return { context, width, height, colour: (name) => style.getPropertyValue(`--${name}`).trim() };
}

/** A bar a verify step, the latest at the right: nodes, and of them the accepted ones. */
export function drawTrees(canvas, verified) {
  const { context, width, height, colour } = begin(canvas);
  const pitch = Math.floor(Math.min(14, Math.max(5, width / verified.length)));
  const shown = verified.slice(-Math.floor(width / pitch));
  const unit = (height - 1) / shown.reduce((most, one) => Math.max(most, one.nodes), 1);
  shown.forEach((one, i) => {
    context.fillStyle = colour("verify");
    context.fillRect(i * pitch, height - one.nodes * unit, pitch - 1, one.nodes * unit);
    context.fillStyle = colour("draft");
    context.fillRect(i * pitch, height - one.accepted * unit, pitch - 1, one.accepted * unit);
  });
  context.fillStyle = colour("edge");
  context.fillRect(0, height - 1, width, 1);
}

/** The steps that an answer's chunks told of, in seconds since the first of them began. */
export class Timeline {
  constructor() {
    this.steps = [];
    this.pushes = []; // {at, nodes}; a draft elsewhere sends them, one in the target's process does not
    this.handovers = []; // the server's reports, with `began` as seconds since the origin
    this.origin = null; // when the first step or hand-over began, on the target's clock
  }

  /** A request has no rows in steps while KV is handed over: what comes first in a chunk began first. */
  add(steps, handovers) {
    for (const report of handovers) {
      this.origin ??= report.began;
      this.handovers.push({ ...report, began: report.began - this.origin });
    }
    for (const step of steps) {
      this.origin ??= step.at;
      const { pushes, ...rest } = step;
      this.steps.push({ ...rest, at: step.at - this.origin });
      this.pushes.push(...pushes.map(({ at, nodes }) => ({ at: at - this.origin, nodes })));
    }
  }

  /** When the last step ended. */
  get end() {
    const last = this.steps.at(-1);
    return last ? last.at + last.draft + last.forward + last.verify + last.coordination : 0;
  }

  /** The timeline in words. */
  get summary() {
    if (!this.steps.length) return "No steps were told of.";
    const sum = (name) => this.steps.reduce((total, step) => total + step[name], 0);
    const parts = ["forward", "verify", "draft", "coordination"].map((name) => [name, sum(name)]);
    const whole = parts.reduce((total, [, seconds]) => total + seconds, 0) || 1;
    const called = (name) => (name === "draft" && this.pushes.length ? "wait for a draft" : name);
    const shares = parts.map(([name, time]) => `${((100 * time) / whole).toFixed(0)} % ${called(name)}`).join(", ");
    const nodes = this.pushes.reduce((total, push) => total + push.nodes, 0);
    const pushed = this.pushes.length ? ` The draft pushed ${nodes} nodes in ${this.pushes.length} messages.` : "";
    const came = this.handovers.map(inWords).join("");
    return `${this.steps.length} steps of the target in ${this.end.toFixed(2)} s: ${shares}.${pushed}${came}`;
  }
}

function inWords({ pool, transport, outcome, tokens, ...seconds }) {
  const time = (name) => `${(1000 * seconds[name]).toFixed(0)} ms`;
  if (outcome !== "whole") return ` A hand-over from ${pool} ended early (${outcome}): ${tokens} tokens in ${time("seconds")}.`;
  const parts = ["queued", "computing", "exposed"].map((name) => `${time(name)} ${name}`).join(", ");
  return ` ${tokens} tokens came from ${pool} by ${transport}: ${seconds.computing ? parts : time("seconds")}.`;
}

/** The `span` seconds of a timeline before `until`. `prefills`: whether it has a lane for a prefill worker. */
export function drawTimeline(canvas, timeline, until, span, prefills) {
  const { context, width, colour } = begin(canvas);
  const from = Math.max(0, until - span);
  const x = (at) => LANES.left + ((at - from) / span) * (width - LANES.left);
  const lanes = ["target", "draft", ...(prefills ? ["prefill"] : [])];
  const axis = LANES[lanes.at(-1)] + LANES.height + 8;
  drawAxis(context, width, colour, from, span, x, lanes, axis);
  context.save();
  context.beginPath();
  context.rect(LANES.left, 0, width - LANES.left, axis);
  context.clip();
  const elsewhere = timeline.pushes.length > 0;
  for (const step of timeline.steps) {
    if (step.at <= from + span && step.at + span >= from) drawStep(context, colour, x, step, elsewhere);
  }
  const most = timeline.pushes.reduce((known, push) => Math.max(known, push.nodes), 1);
  for (const push of timeline.pushes) drawPush(context, colour, x(push.at), push.nodes, most);
  for (const report of timeline.handovers) drawHandOver(context, colour, x, report);
  context.restore();
}

function drawAxis(context, width, colour, from, span, x, lanes, axis) {
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colour("muted");
  context.textBaseline = "middle";
  for (const lane of lanes) context.fillText(lane, 0, LANES[lane] + LANES.height / 2);
  for (const lane of lanes) {
    context.fillStyle = colour("ground");
    context.fillRect(LANES.left, LANES[lane], width - LANES.left, LANES.height);
  }
  const tick = TICKS[span];
  context.textAlign = "center";
  for (let i = Math.ceil(from / tick - 1e-9); i * tick <= from + span + 1e-9; i++) {
    const at = x(i * tick);
    context.fillStyle = colour("line");
    context.fillRect(Math.min(at, width - 1), LANES.target, 1, axis - LANES.target);
    context.fillStyle = colour("muted");
    context.fillText(`${(i * tick).toFixed(1)} s`, Math.min(at, width - 14), axis + 14);
  }
}

/** The draft first, then the forward, then verification. What is left of the step is coordination: a gap. */
function drawStep(context, colour, x, step, elsewhere) {
  const drafted = step.at + step.draft;
  const computed = drafted + step.forward;
  const bar = (name, start, end, top) => {
    context.fillStyle = colour(name);
    context.fillRect(x(start), top, Math.max(end > start ? 1 : 0, x(end) - x(start)), LANES.height);
  };
  bar("forward", drafted, computed, LANES.target);
  bar("verify", computed, computed + step.verify, LANES.target);
  if (!elsewhere) bar("draft", step.at, drafted, LANES.draft);
  else frame(context, colour("wait"), x(step.at), x(drafted), LANES.target);
}

function frame(context, colour, start, end, top) {
  if (end - start < 2) return;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.strokeRect(start + 1, top + 1, end - start - 2, LANES.height - 2);
}

/** A mark at the time of arrival, the higher the more nodes came. */
function drawPush(context, colour, at, nodes, most) {
  const height = Math.max(4, (LANES.height * nodes) / most);
  context.fillStyle = colour("draft");
  context.fillRect(at - 1, LANES.draft + LANES.height - height, 2, height);
}

/** Framed while it was queued; then the forwards, and what the transfer took beyond them. Framed as a whole if it ended
 * early, or if the pool did not say how long it took. The strip below says when segments came. */
function drawHandOver(context, colour, x, report) {
  const { began, queued, computing, arriving, seconds, size, outcome } = report;
  const at = (after) => x(began + after);
  const bar = (name, start, end, top, height) => {
    context.fillStyle = colour(name);
    context.fillRect(at(start), top, Math.max(end > start ? 1 : 0, at(end) - at(start)), height);
  };
  const whole = outcome === "whole";
  const told = whole && computing > 0;
  if (told) {
    bar("prefill", queued, queued + computing, LANES.prefill, LANES.height);
    bar("wait", queued + computing, seconds, LANES.prefill, LANES.height);
  }
  if (size) bar("transfer", arriving, seconds, LANES.prefill + LANES.height - STRIP, STRIP);
  frame(context, colour(whole ? "prefill" : "bad"), at(0), at(told ? queued : seconds), LANES.prefill);
}
