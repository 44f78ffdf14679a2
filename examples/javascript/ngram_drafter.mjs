// The drafter of ../ngram_drafter.py in JavaScript, by docs/draft-protocol.md and nothing else.
//
//     npm install && node ngram_drafter.mjs --listen ipc:///tmp/draft.sock
//
// It learns from all prompts and outputs that it sees, and guesses tokens that followed before. A user who is served
// faster can infer what others wrote: only users who may know that should share it.

import { parseArgs } from "node:util";
import { Decoder, encode } from "@msgpack/msgpack";
import { Router } from "zeromq";

const LOAD_EVERY = 250, SILENCE = 10_000; // ms: between Loads (targets wait for 1000); until a silent target is forgotten
const MAX_SESSIONS = 1024, MAX_CONTEXTS = 1 << 18; // one session more costs another; a fuller table starts anew
const MAX_TOKENS = 1 << 22, MAX_DEPTH = 16; // of one message; no message nests deeper
const CONTEXT = 4, RECENT = 4096; // tokens that are looked up; last tokens of an Open that are learned from
const NODES = 24, CHILDREN = 4, CANDIDATES = 8; // of a tree; of a node; the commonest tokens after a context
const PRIOR = 6; // weight of the shorter contexts, in sightings of a context of one token

/** The target adds it to a token's log-probability before it takes the best (docs/noise-vectors.md). */
export function noise(seed, position, token) {
  let w = [position, 0, token >>> 2, 0];
  let low = Number(seed & 0xffffffffn), high = Number(seed >> 32n);
  for (let round = 0; round < 10; round++) { // Philox4x32-10
    const [a, b] = [product(w[0], 0xd2511f53), product(w[2], 0xcd9e8d57)];
    w = [(b.high ^ w[1] ^ low) >>> 0, b.low, (a.high ^ w[3] ^ high) >>> 0, a.low];
    low = (low + 0x9e3779b9) >>> 0;
    high = (high + 0xbb67ae85) >>> 0;
  }
  return -Math.log(-Math.log((w[token & 3] + 0.5) / 2 ** 32));
}

/** Both words of a product of two words. The doubles err by less than half of what the upper word counts. */
function product(a, b) {
  const low = Math.imul(a, b) >>> 0;
  return { low, high: Math.round((a * b - low) / 2 ** 32) };
}

/** Reads frames of strangers: what they claim takes no more memory than they are long. */
class Reader extends Decoder {
  constructor() {
    super({ useBigInt64: true, mapKeyConverter: String });
    const { stack } = this, nested = stack.getUninitializedStateFromPool.bind(stack);
    stack.getUninitializedStateFromPool = () => {
      if (stack.length >= MAX_DEPTH) throw new RangeError("nested too deep");
      return nested();
    };
  }

  read(frame) {
    this.maxArrayLength = Math.min(frame.length, MAX_TOKENS);
    return narrowed(this.decode(frame));
  }
}

/** Integers that were 64 bits wide for no reason are plain numbers. */
function narrowed(value) {
  if (typeof value === "bigint" && value <= Number.MAX_SAFE_INTEGER) return Number(value);
  if (Array.isArray(value)) return value.map(narrowed);
  if (value?.constructor !== Object) return value;
  return Object.fromEntries(Object.entries(value).map(([name, field]) => [name, narrowed(field)]));
}

/** Answers each Open and Commit with a Tree, and keeps none: the target drops the nodes that it has already. */
class Drafter {
  followers = new Map(); // by context, tokens joined: how often each token came next, and `total`
  tokenizer = null; // the first target's: ids of two vocabularies cannot be mixed
  vocabSize = 0;
  targets = new Map(); // by incarnation: its route, when it was heard, its sessions by number, rows grown for it
  reader = new Reader();

  constructor(socket) {
    this.socket = socket;
  }

  receive(route, incarnation, ...frames) {
    for (const frame of frames) {
      try { // a bad message harms its own session at most
        this.take(route, incarnation?.toString("hex"), this.reader.read(frame));
      } catch {}
    }
  }

  take(route, name, message) {
    if (message.type === "hello" && !this.greet(route, name, message)) return;
    const target = this.targets.get(name);
    if (target === undefined) return; // until its Hello, which comes within a second
    Object.assign(target, { route, heard: performance.now() }); // it may have reconnected
    const handlers = { hello: this.load, open: this.open, commit: this.commit, close: this.close };
    if (Object.hasOwn(handlers, message.type)) handlers[message.type].call(this, target, message);
  }

  greet(route, name, { version, oldest = 1, tokenizer, vocab_size }) {
    if (this.tokenizer === null) [this.tokenizer, this.vocabSize] = [tokenizer, vocab_size];
    if (oldest > 1 || !(version >= 1) || tokenizer !== this.tokenizer) {
      const reason = `expected version 1 and tokenizer ${this.tokenizer.slice(0, 16)}`;
      this.send(route, { type: "refuse", session: 0, generation: 0, reason });
      return false;
    }
    if (!this.targets.has(name)) this.targets.set(name, { sessions: new Map(), rows: 0 });
    return true;
  }

  /** Sends Load to all targets, a few times a second, and forgets silent ones. After a second without Load a target
   * holds back Commits and opens nothing; later it closes its sessions. */
  report() {
    for (const [name, target] of this.targets) {
      if (performance.now() - target.heard >= SILENCE) this.targets.delete(name);
      else this.load(target);
    }
  }

  load(target) {
    const sessions = this.numSessions(), own = { own_sessions: target.sessions.size, own_rows: target.rows };
    const times = { step_ms: 0, queue_ms: 0 }; // they are not measured
    this.send(target.route, { type: "load", model: "ngram", sessions, free_slots: MAX_SESSIONS - sessions, ...own, ...times });
  }

  numSessions() {
    return [...this.targets.values()].reduce((sum, { sessions }) => sum + sessions.size, 0);
  }

  open(target, { session, generation, tokens, max_length, seed, sampling, wanted }) {
    const known = target.sessions.get(session);
    if (known?.generation >= generation) return; // repeated, or late
    if (known === undefined && this.numSessions() >= MAX_SESSIONS) this.dropOne();
    const sampled = (sampling.temperature ?? 1) > 0;
    const state = { session, generation, maxLength: max_length, seed: BigInt(seed), sampled, length: 0, context: [], pushes: 0 };
    target.sessions.set(session, state);
    this.extend(target, state, tokens, wanted);
  }

  /** The target with the most sessions loses the one idle longest. Its next Commit brings it back. */
  dropOne() {
    const [{ sessions }] = [...this.targets.values()].sort((a, b) => b.sessions.size - a.sessions.size);
    sessions.delete(sessions.keys().next().value);
  }

  commit(target, { session, generation, base_len, tokens, wanted }) {
    const state = target.sessions.get(session) ?? { generation: 0, length: 0 };
    const [newer, same] = [generation > state.generation, generation === state.generation];
    if (newer || (same && base_len > state.length)) { // something was lost, or this draft is new
      target.sessions.delete(session);
      this.send(target.route, { type: "resync", session, generation, reason: "tokens are missing" });
    } else if (same && base_len === state.length) { // else it is repeated, or late
      target.sessions.delete(session);
      target.sessions.set(session, state); // the last one now
      this.extend(target, state, tokens, wanted);
    }
  }

  close(target, { session, generation }) {
    if (target.sessions.get(session)?.generation <= generation) target.sessions.delete(session);
  }

  /** Learns what came next, and pushes a Tree of what may follow. */
  extend(target, state, tokens, wanted) {
    if (!tokens.every((token) => Number.isInteger(token) && token >= 0 && token < this.vocabSize))
      throw new RangeError("no token of this vocabulary"); // in the table it would reach all targets
    if (this.followers.size > MAX_CONTEXTS) this.followers.clear();
    for (const token of tokens.slice(-RECENT)) this.learn(state, token);
    state.length += tokens.length;
    const nodes = this.grow(state, Math.min(wanted, NODES));
    if (nodes.length === 0) return;
    const column = (name) => nodes.map((node) => node[name]);
    const columns = { ids: column("id"), parents: column("parent"), tokens: column("token"), scores: column("score") };
    const { session, generation, length: base_len } = state;
    this.send(target.route, { type: "tree", session, generation, sequence: state.pushes++, base_len, ...columns });
    target.rows += nodes.length;
  }

  learn(state, token) {
    for (let n = 1; n <= state.context.length; n++) {
      const context = state.context.slice(-n).join();
      if (!this.followers.has(context)) this.followers.set(context, Object.assign(new Map(), { total: 0 }));
      const counts = this.followers.get(context);
      counts.set(token, (counts.get(token) ?? 0) + 1);
      counts.total++;
    }
    state.context = [...state.context, token].slice(-CONTEXT);
  }

  /** The likeliest nodes below the last token. Parents come first. */
  grow(state, size) {
    const nodes = [], leaves = [{ id: 0, path: 0, context: state.context, position: state.length }]; // the root
    for (let count = 0; leaves.length > 0 && count <= size; count++) {
      const [leaf] = leaves.splice(leaves.reduce((best, one, at) => (one.path > leaves[best].path ? at : best), 0), 1);
      if (count > 0) nodes.push(Object.assign(leaf, { id: state.length * NODES + count })); // ids rise as the length does
      if (leaf.position >= state.maxLength - 1) continue; // nothing is verified where the sequence ends
      for (const { token, chance } of this.children(state, leaf)) {
        const score = Math.log(chance), context = [...leaf.context, token].slice(-CONTEXT);
        leaves.push({ parent: leaf.id, token, score, path: leaf.path + score, context, position: leaf.position + 1 });
      }
    }
    return nodes;
  }

  /** The likeliest tokens at a position, and their chances. */
  children(state, { context, position }) {
    let chances = new Map();
    for (let n = 1; n <= context.length; n++) { // a longer context leaves a part to the shorter ones
      const counts = this.followers.get(context.slice(-n).join());
      if (counts === undefined) continue;
      const total = counts.total + PRIOR / n;
      chances = new Map([...chances].map(([token, chance]) => [token, (chance * PRIOR) / n / total]));
      for (const [token, times] of [...counts].sort((a, b) => b[1] - a[1]).slice(0, CANDIDATES))
        chances.set(token, (chances.get(token) ?? 0) + times / total);
    }
    let total = 1 - [...chances.values()].reduce((sum, chance) => sum + chance, 0); // of all other tokens
    const found = [...chances].map(([token, chance]) => {
      // The target takes the best of log-probability + noise, and the noise is known.
      const weight = state.sampled ? chance * Math.exp(noise(state.seed, position, token)) : chance;
      total += weight;
      return { token, weight };
    });
    const best = found.sort((a, b) => b.weight - a.weight).slice(0, CHILDREN);
    return best.map(({ token, weight }) => ({ token, chance: Math.min(weight / total, 1) }));
  }

  /** ROUTER drops the message if the target is gone or its queue is full; targets notice. */
  send(route, message) {
    this.socket.send([route, encode(message)]).catch(() => {});
  }
}

function fail(line) {
  console.error(`ngram_drafter: ${line}`);
  process.exit(2);
}

async function main() {
  const { values } = parseArgs({ options: { listen: { type: "string", default: "" } }, strict: false });
  if (!/^(ipc|tcp):\/\/./.test(values.listen)) fail(`--listen is '${values.listen}'; expected ipc://PATH or tcp://HOST:PORT`);
  const socket = new Router({ linger: 0, maxMessageSize: 1 << 24, sendTimeout: 0 });
  await socket.bind(values.listen).catch((error) => fail(`--listen: ${values.listen} cannot be had: ${error.message}`));
  const drafter = new Drafter(socket), reporting = setInterval(() => drafter.report(), LOAD_EVERY);
  for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, () => socket.close());
  for await (const parts of socket) drafter.receive(...parts);
  clearInterval(reporting);
}

if (import.meta.filename === process.argv[1]) await main();
