// Tests node-postgres (`pg`), the PostgreSQL driver for Node.js, and its pool. Started by
// tests/clients/run.
"use strict";

const assert = require("node:assert/strict");
const readline = require("node:readline");
const { Client, DatabaseError, Pool } = require("pg");
const Cursor = require("pg-cursor");

const ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
const runner = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** The server's URL for a database and a user (default: the superuser). */
function address(database, user, password) {
  const url = new URL(process.env.DATABASE_URL);
  url.pathname = `/${database}`;
  if (user) [url.username, url.password] = [user, encodeURIComponent(password)];
  return url.toString();
}

const SHOP = address("shop", "ada", "wing's");

async function connected(connectionString, work) {
  const client = new Client({ connectionString });
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.end();
  }
}

/** Requires that the work fails with this SQLSTATE. */
async function expectSqlstate(code, work) {
  await assert.rejects(work, (error) => {
    assert(error instanceof DatabaseError, error);
    assert.equal(error.code, code, error.message);
    return true;
  });
}

async function passwords() {
  await connected(address("fulmar"), async (admin) => {
    await admin.query("CREATE USER ada PASSWORD 'wing''s'");
    await admin.query("CREATE DATABASE shop WITH OWNER ada");
  });
  await expectSqlstate("28P01", () => connected(address("shop", "ada", "wrong"), () => {}));
  await expectSqlstate("3D000", () => connected(address("no_such_database"), () => {}));
}

async function migrations(pool) {
  const script = `
    CREATE TABLE IF NOT EXISTS customer (id BIGINT PRIMARY KEY, email TEXT NOT NULL UNIQUE, since DATE);
    CREATE TABLE IF NOT EXISTS account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL CHECK (balance >= 0));
    CREATE INDEX IF NOT EXISTS customer_since ON customer (since);`;
  for (let time = 0; time < 2; time++) await pool.query(script);
  const insert = "INSERT INTO customer VALUES ($1, $2, $3) RETURNING id";
  const { rows, rowCount } = await pool.query(insert, [1, "ada@example.org", null]);
  // A bigint does not fit into a number, so it is returned as text.
  assert.deepEqual([rows, rowCount], [[{ id: "1" }], 1]);
  // Inserts many rows with one statement.
  const ids = JSON.stringify([...Array(1000).keys()].map((id) => ({ id })));
  await pool.query(await fillAccounts(pool), [ids]);
}

async function isFulmar(pool) {
  const { rows } = await pool.query("SELECT version() AS version");
  return rows[0].version.includes("Fulmar");
}

/** A list is passed as JSON and unpacked by a function of SQLite or of PostgreSQL. */
async function fillAccounts(pool) {
  return (await isFulmar(pool))
    ? "INSERT INTO account SELECT value ->> 'id', 100 FROM json_each($1)"
    : "INSERT INTO account SELECT (value ->> 'id')::bigint, 100 FROM json_array_elements($1)";
}

async function valuesRoundTrip(pool) {
  const samples = {
    BIGINT: ["0", "-9223372036854775808", "9223372036854775807"],
    INT4: [-2147483648],
    SMALLINT: [32767],
    "DOUBLE PRECISION": [0.5, -1e300],
    TEXT: ["", "Hé 'quoted' \\ 鳥", "x".repeat(100_000)],
    BYTEA: [Buffer.from([]), Buffer.from([0, 1, 255])],
    BOOLEAN: [true, false],
    DATE: [new Date(2026, 10, 20)],
    TIME: ["23:59:59.000005"],
    TIMESTAMP: [new Date(2026, 10, 20, 23, 59, 59, 123)],
    TIMESTAMPTZ: [new Date(Date.UTC(2026, 10, 20, 23, 59, 59))],
    NUMERIC: ["1234.5"],
    UUID: ["12345678-1234-5678-1234-567812345678"],
    JSON: [{ a: [1, null, "é"] }],
    JSONB: [{ a: [1, null, "é"] }],
  };
  for (const [declared, values] of Object.entries(samples)) {
    const table = `v_${declared.toLowerCase().replace(" ", "_")}`;
    await pool.query(`CREATE TABLE ${table} (n BIGINT PRIMARY KEY, v ${declared})`);
    const wanted = [...values, null];
    for (const [n, value] of wanted.entries()) await pool.query(`INSERT INTO ${table} VALUES ($1, $2)`, [n, value]);
    const { rows } = await pool.query({ text: `SELECT v FROM ${table} ORDER BY n`, rowMode: "array" });
    assert.deepEqual(rows.map(([value]) => value), wanted, declared);
  }
}

async function procedures(pool) {
  if (!(await isFulmar(pool))) return; // PostgreSQL has no Lua
  await pool.query(`CREATE PROCEDURE product(a BIGINT, b BIGINT) RETURNS TABLE (total BIGINT)
    LANGUAGE lua AS 'return {{ total = a * b }}'`);
  const { rows } = await pool.query("CALL product($1, $2)", [6, 7]);
  assert.deepEqual(rows, [{ total: "42" }]);
}

async function transactions(pool) {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    await client.query("UPDATE account SET balance = 1 WHERE id = $1", [1]);
    await client.query("SAVEPOINT inner_part");
    await client.query("UPDATE account SET balance = 2 WHERE id = $1", [2]);
    await client.query("ROLLBACK TO SAVEPOINT inner_part");
    await client.query("COMMIT");
  } finally {
    client.release();
  }
  const { rows } = await pool.query("SELECT balance FROM account WHERE id IN (1, 2) ORDER BY id");
  assert.deepEqual(rows, [{ balance: "1" }, { balance: "100" }]);
}

async function cursors(pool) {
  const client = await pool.connect();
  const cursor = client.query(new Cursor("SELECT id FROM account WHERE id >= $1 ORDER BY id", [500]));
  const read = [];
  for (let rows = await cursor.read(100); rows.length > 0; rows = await cursor.read(100)) {
    read.push(...rows.map(({ id }) => Number(id)));
  }
  await cursor.close();
  client.release();
  assert.deepEqual(read, [...Array(500).keys()].map((n) => n + 500));
}

async function errorsHaveTheRightSqlstate(pool) {
  const expected = {
    23505: "INSERT INTO account VALUES (1, 1)",
    23514: "UPDATE account SET balance = -1 WHERE id = 3",
    23502: "INSERT INTO account VALUES (5000, NULL)",
    "42P01": "SELECT * FROM no_such_table",
    42703: "SELECT no_such_column FROM account",
    42601: "SELEKT 1",
  };
  const client = await pool.connect();
  for (const [code, sql] of Object.entries(expected)) {
    await client.query("BEGIN");
    await expectSqlstate(code, () => client.query(sql));
    await expectSqlstate("25P02", () => client.query("SELECT 1"));
    await client.query("ROLLBACK");
  }
  const byId = "SELECT id FROM account WHERE id = $1";
  await expectSqlstate("22P02", () => client.query(byId, ["seven"]));
  client.release();
}

/** Runs a transaction, and retries it after a conflict. docs/clients.md shows this. */
async function retry(pool, work, attempts = 5) {
  for (let attempt = 1; ; attempt++) {
    const client = await pool.connect();
    try {
      await client.query("BEGIN ISOLATION LEVEL SERIALIZABLE");
      const answer = await work(client, attempt);
      await client.query("COMMIT");
      return answer;
    } catch (error) {
      await client.query("ROLLBACK");
      if (attempt === attempts || !["40001", "40P01"].includes(error.code)) throw error;
    } finally {
      client.release();
    }
  }
}

async function conflictsAreRetried(pool) {
  const attempts = await retry(pool, async (client, attempt) => {
    const { rows } = await client.query("SELECT balance FROM account WHERE id = 800");
    if (attempt === 1) await pool.query("UPDATE account SET balance = balance + 1 WHERE id = 800");
    await client.query("UPDATE account SET balance = $1 WHERE id = 800", [2n * BigInt(rows[0].balance)]);
    return attempt;
  });
  const { rows } = await pool.query("SELECT balance FROM account WHERE id = 800");
  assert.deepEqual([attempts, rows[0].balance], [2, "202"]);
}

async function timeouts() {
  const client = new Client({ connectionString: SHOP, statement_timeout: 100 });
  await client.connect();
  await expectSqlstate("57014", () => client.query(ENDLESS));
  const { rows } = await client.query("SELECT count(*) AS n FROM account");
  assert.deepEqual(rows, [{ n: "1000" }]);
  await client.end();
}

async function preparedStatementsAfterSchemaChange(pool) {
  await pool.query("CREATE TABLE grows (a BIGINT)");
  await pool.query("INSERT INTO grows VALUES (1)");
  const client = await pool.connect();
  const [byName, all] = [
    { name: "by name", text: "SELECT a FROM grows" },
    { name: "all", text: "SELECT * FROM grows" },
  ];
  for (const query of [byName, all]) assert.deepEqual((await client.query(query)).rows, [{ a: "1" }]);
  await pool.query("ALTER TABLE grows ADD COLUMN b BIGINT");
  assert.deepEqual((await client.query(byName)).rows, [{ a: "1" }]);
  // The driver keeps a named statement for the lifetime of its connection.
  await expectSqlstate("0A000", () => client.query(all));
  client.release(true);
  assert.deepEqual((await pool.query(all)).rows, [{ a: "1", b: null }]);
}

async function poolReconnects(pool) {
  // Two idle connections of the pool are lost by the restart.
  await Promise.all([pool.query("SELECT 1"), pool.query("SELECT 1")]);
  console.log("restart");
  assert.equal((await runner.next()).value, "restarted");
  // A connection may turn out to be lost when it is used. The pool then replaces it.
  for (let attempt = 1; ; attempt++) {
    try {
      const { rows } = await pool.query("SELECT count(*) AS n FROM account");
      return assert.deepEqual(rows, [{ n: "1000" }]);
    } catch (error) {
      assert(attempt < 5 && !(error instanceof assert.AssertionError), error);
    }
  }
}

async function main() {
  console.log(`driver node-postgres ${require("pg/package.json").version}`);
  await passwords();
  console.log("ok passwords");
  const pool = new Pool({ connectionString: SHOP, max: 4 });
  // A loss of an idle connection is reported here. Without a listener the process would exit.
  pool.on("error", () => {});
  const checks = [
    migrations,
    valuesRoundTrip,
    procedures,
    transactions,
    cursors,
    errorsHaveTheRightSqlstate,
    conflictsAreRetried,
    timeouts,
    preparedStatementsAfterSchemaChange,
    poolReconnects,
  ];
  for (const check of checks) {
    await check(pool);
    console.log(`ok ${check.name}`);
  }
  await pool.end();
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
