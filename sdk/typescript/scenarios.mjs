// Runs sdk/scenarios.json with this SDK: node scenarios.mjs MODULE SCENARIOS NAME=VALUE…, where MODULE is the built package.
// What it prints is what each scenario came to; the exit code says whether all went well.
import { Buffer } from "node:buffer";
import { readFile } from "node:fs/promises";

const [module, path, ...pairs] = process.argv.slice(2);
const forkd = await import(module);
const suite = JSON.parse(await readFile(path, "utf8"));

class Wrong extends Error {}

const camel = (name) => name.replace(/_([a-z0-9])/g, (_, c) => c.toUpperCase());
const show = (value) => JSON.stringify(value, (_, v) => (v instanceof Uint8Array ? [...v] : v))?.slice(0, 500);

const vars = Object.fromEntries(pairs.map((p) => [p.slice(0, p.indexOf("=")), p.slice(p.indexOf("=") + 1)]));
const clients = [];

function member(value, name, raw) {
  if (/^\d+$/.test(name)) return value[Number(name)];
  const own = raw ? name : camel(name);
  if (own === "text" && value?.data instanceof Uint8Array) return new TextDecoder().decode(value.data);
  return value?.[own];
}

function look(path) {
  const [head, ...rest] = path.split(".");
  if (!(head in vars)) throw new Wrong(`nothing is called ${head}`);
  return rest.reduce((value, part) => member(value, part), vars[head]);
}

// Objects whose members are not the SDK's to name.
const theirs = new Set(["labels", "env", "metadata", "headers", "params", "json", "limits"]);

function fill(value, names = false) {
  if (typeof value === "string") {
    if (value.startsWith("$")) return look(value.slice(1));
    return value.replace(/\{([\w.]+)\}/g, (_, name) => String(look(name)));
  }
  if (Array.isArray(value)) return value.map((v) => fill(v));
  if (typeof value !== "object" || value === null) return value;
  if ("$bytes" in value) return new Uint8Array(Buffer.from(value.$bytes, "base64"));
  if ("$collect" in value) {
    const collected = (vars[value.$collect] = []);
    return (v) => collected.push(v);
  }
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [names ? camel(k) : k, fill(v, names && !theirs.has(k))]));
}

function hold(seen, want, where, raw) {
  const wrong = (why = "") => new Wrong(`${where}: ${show(seen)}; ${show(want)} was expected ${why}`);
  if (want instanceof Uint8Array) {
    if (Buffer.compare(seen, want) !== 0) throw wrong();
  } else if (Array.isArray(want)) {
    if (seen?.length !== want.length) throw wrong("(other length)");
    want.forEach((w, i) => hold(seen[i], w, `${where}[${i}]`, raw));
  } else if (typeof want === "object" && want !== null) {
    for (const [key, w] of Object.entries(want)) {
      if (key === "$contains") {
        if (!seen.some((v) => fits(v, w, raw))) throw wrong();
      } else if (key === "$matches") {
        if (!new RegExp(w).test(seen)) throw wrong();
      } else if (key === "$length") {
        if (seen.length !== w) throw wrong();
      } else if (key === "$least") {
        if (!(seen >= w)) throw wrong();
      } else hold(member(seen, key, raw || where.endsWith("labels") || where.endsWith("metadata")), w, `${where}.${key}`, raw);
    }
  } else if (seen !== want) throw wrong();
}

function fits(seen, want, raw) {
  try {
    hold(seen, want, "", raw);
    return true;
  } catch {
    return false;
  }
}

async function take(source, count) {
  const found = [];
  for await (const v of source) {
    found.push(v);
    if (found.length >= count) break;
  }
  return found;
}

// A class's constructor or static method, or a method of something, takes its options last.
async function call(step) {
  const args = fill(step.args ?? []);
  const options = step.options ? fill(step.options, true) : undefined;
  if (step.do === "cleanup") return cleanup();
  if (step.do.startsWith("new ")) {
    const made = new forkd[step.do.slice(4)](...(options ? [options] : []));
    clients.push(made);
    return made;
  }
  let target = step.on ? look(step.on) : forkd;
  if (step.do === "take") return take(step.iterate ? target[step.iterate](options) : target, step.count);
  if (step.do === "watch") {
    const events = await target.files.watch(...args, ...(options ? [options] : []));
    for (const s of step.inside) await run(s);
    return take(events, step.count);
  }
  const parts = step.do.split(".");
  const name = camel(parts.pop());
  for (const part of parts) target = target[part];
  const given = [...args];
  if (options) {
    const at = { branch: 1, fork: 1, branchSandbox: 1 }[name];
    while (at !== undefined && given.length < at) given.push(undefined);
    given.push(options);
  }
  return target[name](...given);
}

async function cleanup() {
  const mine = vars.client;
  const there = new Set((await mine.request("GET", "/v1/sandboxes")).map((s) => s.id));
  for (const v of Object.values(vars)) {
    if (v instanceof forkd.Sandbox && there.delete(v.id)) await mine.request("DELETE", `/v1/sandboxes/${v.id}`);
  }
  for (const c of clients) await c.close?.();
}

async function run(step) {
  const times = step.repeat ?? 1;
  const wanted = step.error ?? step.throws;
  let value;
  for (let n = 0; n < times; n++) {
    try {
      value = "value" in step ? fill(step.value) : await call(step);
    } catch (e) {
      if (!wanted || !(e instanceof forkd.ForkdError)) throw e;
      if (n + 1 < times && e.code !== step.error) continue;
      const right = step.throws
        ? e instanceof forkd[step.throws]
        : e.constructor === forkd.errors[step.error] && e.code === step.error && e.message;
      if (!right) throw new Wrong(`${step.do}: ${e.name} ${e.code}: ${e.message}; ${wanted} was expected`);
      return;
    }
  }
  if (wanted) throw new Wrong(`${step.do}: no error; ${wanted} was expected`);
  if (step.as) vars[step.as] = value;
  if ("expect" in step) hold(value, fill(step.expect), step.do ?? step.value, step.raw);
}

if (Object.keys(forkd.errors).sort().join() !== [...suite.codes].sort().join()) {
  console.log(`FAIL the codes that have classes: ${Object.keys(forkd.errors)}`);
  process.exit(1);
}
let passed = 0;
let failed = 0;
let skipped = 0;
for (const s of suite.setup) await run(s);
try {
  for (const scenario of suite.scenarios) {
    if (vars.only && !new RegExp(vars.only).test(scenario.name)) continue;
    if (!((scenario.needs ?? "snapshot") in vars)) {
      skipped++;
      continue;
    }
    const began = performance.now();
    try {
      for (const s of scenario.steps) await run(s);
      passed++;
      console.log(`ok   ${scenario.name} (${((performance.now() - began) / 1000).toFixed(1)} s)`);
    } catch (e) {
      failed++;
      console.log(`FAIL ${scenario.name}: ${e.name}: ${e.message}${e instanceof Wrong || e instanceof forkd.ForkdError ? "" : `\n${e.stack}`}`);
    }
  }
} finally {
  for (const s of suite.teardown) await run(s);
}
console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
process.exitCode = failed || !passed ? 1 : 0;
