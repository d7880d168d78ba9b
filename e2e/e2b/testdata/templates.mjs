// Templates built with E2B's JavaScript SDK of images of a registry, against a daemon.
//
// Prints a line of JSON for each check: {"method", "ok", "note"}. Expects E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY; the arguments are
// the registry's address and a template to stand on. With "quick" as the third, what takes long is left out; with another word, the
// checks without it in their name. What is copied is made beside this file, as clients look for it there.

import assert from 'node:assert/strict'
import { randomBytes, randomUUID } from 'node:crypto'
import { chmodSync, mkdirSync, symlinkSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

import { BuildError, Sandbox, Template, waitForFile, waitForPort, waitForURL } from 'e2b'

const [registry, parent, only = ''] = process.argv.slice(2)
const here = dirname(fileURLToPath(import.meta.url))
const small = `${registry}/small:v1`
const checks = []
const made = []

function check(method, f, { slow = true } = {}) {
  checks.push({ method, f, slow })
}

function name() {
  made.push('made-' + randomUUID().slice(0, 8))
  return made.at(-1)
}

async function build(template, alias = name(), more = {}) {
  const lines = []
  await Template.build(template, { alias, onBuildLogs: (e) => lines.push(e.message), ...more })
  return { alias, lines }
}

async function fails(template, ...words) {
  let failure
  try {
    await build(template)
  } catch (e) {
    failure = e
  }
  assert(failure instanceof BuildError, `${failure}, want a BuildError`)
  for (const word of words) assert(failure.message.includes(word), `${failure.message} does not say ${word}`)
  return failure
}

const out = async (sb, command, more) => (await sb.commands.run(command, more)).stdout

async function use(alias, f) {
  const sb = await Sandbox.create(alias, { timeoutMs: 100_000 })
  try {
    await f(sb)
  } finally {
    await sb.kill()
  }
}

check('Template.build: from an image, with every kind of step and a start command', async () => {
  mkdirSync(join(here, 'app', 'sub'), { recursive: true })
  writeFileSync(join(here, 'app', 'a.txt'), 'a\n')
  writeFileSync(join(here, 'app', 'sub', 'b.sh'), '#!/bin/bash\necho from b\n')
  chmodSync(join(here, 'app', 'sub', 'b.sh'), 0o755)
  writeFileSync(join(here, 'one.txt'), 'one\n')
  const template = Template()
    .fromImage(small)
    .setEnvs({ ONCE: randomUUID(), COLOUR: 'blue', ODD: 'a "b" $HOME \\ c' })
    .runCmd('id -un > who; pwd >> who; echo $COLOUR$PROFILE >> who; echo some words')
    .copy('app', 'app')
    .copy('one.txt', '/srv/', { user: 'root', mode: 0o600 })
    .runCmd(['mkdir -p /srv/data', 'chown user /srv/data'], { user: 'root' })
    .setWorkdir('/srv/data')
    .runCmd('echo "$ODD" > odd')
    .setStartCmd('exec nc -ll -p 8123 -e cat /srv/data/odd', waitForPort(8123))
  const { alias, lines } = await build(template)
  assert(lines.join('\n').includes('some words'), lines.join('\n'))
  await use(alias, async (sb) => {
    assert.equal(await out(sb, 'cat /home/user/who'), 'user\n/home/user\nblueread\n')
    assert.equal(await out(sb, 'cat ~/app/a.txt; ~/app/sub/b.sh'), 'a\nfrom b\n')
    assert.equal(await out(sb, "cat /srv/one.txt; stat -c '%U %a' /srv/one.txt", { user: 'root' }), 'one\nroot 600\n')
    assert.equal(await out(sb, 'pwd; echo $COLOUR; nc 127.0.0.1 8123 </dev/null'), '/srv/data\nblue\na "b" $HOME \\ c\n')
  })
  const again = await build(template, alias)
  assert(again.lines.join('\n').includes('(done before)'), again.lines.join('\n'))
}, { slow: false })

check('Template.build: a step that fails', async () => {
  const e = await fails(Template().fromImage(small).runCmd('true').runCmd('echo nearly; exit 3'), 'exit status 3', 'nearly')
  assert(e.stack.includes('templates.mjs'), e.stack)
}, { slow: false })

check('Template.build: what is asked for and cannot be had', async () => {
  await fails(Template().fromImage(`${registry}/small:none`), 'small:none')
  await fails(Template().fromImage(`${registry}/small:bare`).runCmd('true'), 'no /bin/bash')
  await fails(Template().fromTemplate('no-such'), 'no-such')
  await fails(Template().fromImage(small, { username: 'me', password: 'secret' }), 'fromImageRegistry')
  await fails(Template().fromImage(small).setStartCmd('sleep 1000', waitForURL('http://localhost:80/')), 'needs curl')
  await fails(Template().fromImage(small).setStartCmd('echo so much; exit 4', waitForPort(80)), 'so much', 'exit status 4')
})

check('Template.build: files', async () => {
  mkdirSync(join(here, 'tree'), { recursive: true })
  for (let n = 0; n < 30; n++) writeFileSync(join(here, 'tree', `${n}.py`), `${n}`)
  try {
    symlinkSync('3.py', join(here, 'tree', 'link'))
  } catch {
    // It is there.
  }
  const data = randomBytes(20 << 20)
  writeFileSync(join(here, 'large'), data)
  const { alias } = await build(Template().fromImage(small).copy('tree', '/srv/tree', { user: 'root' }).copy('large', '/srv/large', { user: 'user', mode: 0o644 }))
  await use(alias, async (sb) => {
    assert.equal(await out(sb, 'ls /srv/tree | wc -l; readlink /srv/tree/link'), '31\n3.py\n')
    assert(data.equals(Buffer.from(await sb.files.read('/srv/large', { format: 'bytes' }))))
  })
})

check('Template.build: on another template; ready command', async () => {
  const { alias } = await build(Template().fromImage(small).setStartCmd('sleep 1; touch /tmp/up; exec sleep 1000', waitForFile('/tmp/up')))
  const above = await build(Template().fromTemplate(alias).runCmd('test -f /tmp/up && touch /tmp/above'))
  await use(above.alias, async (sb) => {
    assert(await sb.files.exists('/tmp/above'))
    assert((await sb.commands.list()).some((p) => [p.cmd, ...p.args].join(' ').includes('sleep 1000')))
  })
  const warm = await build(Template().fromTemplate(parent).runCmd('echo more > /tmp/more'))
  await use(warm.alias, async (sb) => assert.equal(await out(sb, 'cat /tmp/more'), 'more\n'))
  assert(await Template.exists(warm.alias))
})

let failed = false
for (const { method, f, slow } of checks) {
  if (only === 'quick' ? slow : !method.includes(only)) continue
  const began = performance.now()
  const result = { ok: true, note: '' }
  try {
    await f()
  } catch (e) {
    failed = true
    result.ok = false
    result.note = String(e.stack)
  }
  console.log(JSON.stringify({ method, ...result, seconds: Math.round(performance.now() - began) / 1000 }))
}
for (const alias of made.reverse()) {
  try {
    await Sandbox.deleteSnapshot(alias)
  } catch (e) {
    console.error(`${alias} stays: ${e}`)
  }
}
process.exit(failed ? 1 : 0)
