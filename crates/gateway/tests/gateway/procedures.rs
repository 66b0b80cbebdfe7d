//! Procedures, as clients see them: their effects, restrictions and errors.

use std::time::Duration;

use crate::common::{Node, connect, state};
use tokio_postgres::{Client, SimpleQueryMessage};

const TRANSFER: &str =
    "CREATE PROCEDURE transfer(source INTEGER, target INTEGER, amount INTEGER) LANGUAGE lua AS $$
    local rows = db.query('SELECT balance FROM account WHERE id = $1', source)
    if #rows == 0 then db.abort('no such account: ' .. source) end
    if rows[1].balance < amount then error('too little') end
    db.exec('UPDATE account SET balance = balance - $2 WHERE id = $1', source, amount)
    db.exec('UPDATE account SET balance = balance + $2 WHERE id = $1', target, amount)
$$";

async fn bank(node: &Node) -> Client {
    let client = node.database("bank").await;
    client
        .batch_execute(
            "CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, note TEXT UNIQUE);
             INSERT INTO account VALUES (1, 100, 'a'), (2, 0, 'b')",
        )
        .await
        .unwrap();
    client.batch_execute(TRANSFER).await.unwrap();
    client
}

async fn balances(client: &Client) -> Vec<i64> {
    let rows = client.query("SELECT balance FROM account ORDER BY id", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Creates a procedure `p` without parameters, and calls it.
async fn run(client: &Client, source: &str) -> Result<Vec<SimpleQueryMessage>, tokio_postgres::Error> {
    create(client, source).await?;
    client.simple_query("CALL p()").await
}

async fn create(client: &Client, source: &str) -> Result<(), tokio_postgres::Error> {
    client.batch_execute(&format!("CREATE OR REPLACE PROCEDURE p() LANGUAGE lua AS $$ {source} $$")).await
}

#[tokio::test]
async fn a_call_is_one_transaction() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    client.execute("CALL transfer($1, $2, $3)", &[&1i64, &2i64, &30i64]).await.unwrap();
    client.batch_execute("CALL transfer(1, 2, 10 + 10)").await.unwrap();
    assert_eq!(balances(&client).await, [50, 50]);

    let aborted = client.batch_execute("CALL transfer(7, 2, 1)").await.unwrap_err();
    let aborted = aborted.as_db_error().unwrap();
    assert_eq!((aborted.code().code(), aborted.message()), ("P0001", "no such account: 7"));
    let failed = client.batch_execute("CALL transfer(1, 2, 1000)").await.unwrap_err();
    let failed = failed.as_db_error().unwrap();
    assert_eq!((failed.code().code(), failed.message()), ("38000", "transfer:4: too little"));
    assert_eq!(balances(&client).await, [50, 50]);

    // In a transaction of the client, it is rolled back with the transaction.
    client
        .batch_execute("BEGIN; CALL transfer(1, 2, 50); SAVEPOINT s; CALL transfer(2, 1, 7)")
        .await
        .unwrap();
    client.batch_execute("ROLLBACK TO s").await.unwrap();
    assert_eq!(balances(&client).await, [0, 100]);
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(balances(&client).await, [50, 50]);
    node.stop().await;
}

#[tokio::test]
async fn failed_calls_leave_no_effects() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    let half = "db.exec('UPDATE account SET balance = 0'); ";
    for (end, expected) in [
        ("db.exec('INSERT INTO account VALUES (1, 0, NULL)')", "23505"),
        ("db.query('SELECT missing FROM account')", "42703"),
        ("db.query('SELECT * FROM nowhere')", "42P01"),
        ("pcall(db.abort, 'enough')", "P0001"),
        ("local x = nil; return x.y", "38000"),
    ] {
        let outcome = run(&client, &format!("{half}{end}")).await;
        let text = format!("{end}: {outcome:?}");
        assert_eq!(state(outcome), expected, "{text}");
        assert_eq!(balances(&client).await, [100, 0], "{end}");
    }
    // A caught error leaves no effects, and the procedure continues.
    let caught = "local ok = pcall(db.exec, 'INSERT INTO account VALUES (1, 0, NULL)')
                  assert(not ok)
                  db.exec('UPDATE account SET balance = 5 WHERE id = 2')";
    run(&client, caught).await.unwrap();
    let failed = "local ok, err = pcall(db.exec, 'INSERT INTO account VALUES (1, 0, NULL)')
                db.abort(tostring(err))";
    let failed = run(&client, failed).await.unwrap_err();
    let message = failed.as_db_error().unwrap().message().to_owned();
    assert!(message.contains("account.id"), "{message}");
    assert_eq!(balances(&client).await, [100, 5]);
    node.stop().await;
}

#[tokio::test]
async fn values_are_converted_between_sql_and_lua() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    client
        .batch_execute(
            "CREATE PROCEDURE answer(t TEXT, r DOUBLE PRECISION, b BLOB, n INTEGER)
             RETURNS TABLE (t TEXT, r REAL, b BLOB, n INTEGER, yes BOOLEAN) LANGUAGE lua AS $$
                 local back = db.query('SELECT $1 AS t, $2 AS r, $3 AS b, $4 AS n', t, r, b, n)[1]
                 assert(back.n == nil and typeof(back.b) == 'buffer')
                 return {{ t = back.t .. '!', r = r / 2, b = b, yes = true }, { 'x', 0.5 }}
             $$",
        )
        .await
        .unwrap();
    let rows = client
        .query("CALL answer($1, $2, $3, $4)", &[&"é", &3.0f64, &&[0u8, 255][..], &None::<i64>])
        .await
        .unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].columns()[0].name(), "t");
    assert_eq!(rows[0].get::<_, String>(0), "é!");
    assert_eq!(rows[0].get::<_, f64>(1), 1.5);
    assert_eq!(rows[0].get::<_, Vec<u8>>(2), [0, 255]);
    assert_eq!(rows[0].get::<_, Option<i64>>(3), None);
    assert!(rows[0].get::<_, bool>(4));
    assert_eq!((rows[1].get::<_, String>(0), rows[1].get::<_, f64>(1)), ("x".to_owned(), 0.5));

    assert_eq!(state(run(&client, "db.query('SELECT 9007199254740993')").await), "22003");
    assert_eq!(state(run(&client, "db.query('SELECT $1', '\\255')").await), "22P02");
    for wrong in ["db.query('SELECT $1', {})", "db.query(7)", "db.exec()"] {
        assert_eq!(state(run(&client, wrong).await), "42804", "{wrong}");
    }
    let rows = "CREATE PROCEDURE rows() RETURNS TABLE (a INTEGER) LANGUAGE lua AS $$ return { { 1 }, 2 } $$; CALL rows()";
    assert_eq!(state(client.simple_query(rows).await), "42804");
    // An error that `pcall` caught does not fail the transaction. If it is raised again, it keeps
    // its SQLSTATE.
    let caught =
        "if pcall(db.query, 7) or pcall(db.exec, 'SELECT missing') then error('no') end; db.exec('SELECT 1')";
    run(&client, caught).await.unwrap();
    assert_eq!(
        state(run(&client, "local _, e = pcall(db.query, 'SELECT missing'); error(e)").await),
        "42703"
    );
    // An argument keeps its type after another argument that contains commas.
    let rows = client
        .query("CALL answer(replace('xyz', $1, ''), $2, $3, $4)", &[&"z", &1.0f64, &&[1u8][..], &None::<i64>])
        .await
        .unwrap();
    assert_eq!((rows[0].get::<_, String>(0), rows[0].get::<_, f64>(1)), ("xy!".to_owned(), 0.5));
    assert_eq!(state(client.batch_execute("CALL answer(1)").await), "42883");
    let two_rows = "CALL answer('a', 1, NULL, id FROM account)";
    assert_eq!(state(client.batch_execute(two_rows).await), "42601");
    // A statement that changes nothing returns 0, whatever the previous statement changed.
    let counts = "db.exec('UPDATE account SET note = note')
                  assert(db.exec('SELECT 1') == 0 and db.exec('DELETE FROM account WHERE id = 9') == 0)";
    run(&client, counts).await.unwrap();
    assert_eq!(state(client.batch_execute("CALL missing()").await), "42883");
    assert_eq!(state(client.batch_execute("CALL answer").await), "42601");
    node.stop().await;
}

#[tokio::test]
async fn procedure_definitions_are_transactional() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    assert_eq!(state(client.batch_execute(TRANSFER).await), "42723");
    let broken = "CREATE PROCEDURE broken() LANGUAGE lua AS $$\n\n local = 1 $$";
    let error = client.batch_execute(broken).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(error.code().code(), "42601");
    assert!(error.message().contains("broken:3:"), "{}", error.message());
    for refused in [
        "CREATE PROCEDURE p(\"end\" TEXT) LANGUAGE lua AS ''",
        "CREATE PROCEDURE p() LANGUAGE plpgsql AS ''",
        "CREATE PROCEDURE p() AS ''",
        "CREATE PROCEDURE p() LANGUAGE lua",
        "CREATE PROCEDURE p LANGUAGE lua AS ''",
        "CREATE PROCEDURE p(a INTEGER DEFAULT 1) LANGUAGE lua AS ''",
    ] {
        assert_ne!(state(client.batch_execute(refused).await), "00000", "{refused}");
    }
    let call = client.prepare("CALL transfer(1, 2, 1)").await.unwrap();
    client
        .batch_execute("BEGIN; DROP PROCEDURE transfer(INTEGER x, INTEGER y, INTEGER z); ROLLBACK")
        .await
        .unwrap();
    client.execute(&call, &[]).await.unwrap();
    client
        .batch_execute("CREATE OR REPLACE PROCEDURE transfer(a INTEGER, b INTEGER, c INTEGER) LANGUAGE lua AS 'db.exec(''UPDATE account SET balance = -1'')'")
        .await
        .unwrap();
    client.execute(&call, &[]).await.unwrap();
    assert_eq!(balances(&client).await, [-1, -1]);
    client.batch_execute("CREATE OR REPLACE PROCEDURE transfer(a INTEGER, b INTEGER, c INTEGER) RETURNS TABLE (x INTEGER) LANGUAGE lua AS 'return {{1}}'").await.unwrap();
    assert_eq!(state(client.execute(&call, &[]).await), "0A000");
    let again = client.query("CALL transfer(1, 2, 1)", &[]).await.unwrap();
    assert_eq!(again[0].get::<_, i64>(0), 1);
    client.batch_execute("DROP PROCEDURE transfer").await.unwrap();
    assert_eq!(state(client.execute(&call, &[]).await), "42883");
    assert_eq!(state(client.batch_execute("DROP PROCEDURE transfer").await), "42883");
    client.batch_execute("DROP PROCEDURE IF EXISTS transfer").await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn the_sandbox_cannot_be_escaped() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    for removed in [
        "os",
        "io",
        "debug",
        "coroutine",
        "require",
        "loadstring",
        "load",
        "dofile",
        "getfenv",
        "setfenv",
        "newproxy",
        "collectgarbage",
        "gcinfo",
        "print",
        "math.random",
        "string.dump",
    ] {
        run(&client, &format!("assert({removed} == nil)")).await.unwrap_or_else(|e| panic!("{removed}: {e}"));
    }
    for (escape, expected) in [
        ("leak = 1", "38000"),
        ("rawset(_G or {}, 'x', 1); string.format = nil", "38000"),
        ("getmetatable('').__index = nil", "38000"),
        ("db.query = nil", "38000"),
        ("table.insert(math, 1)", "38000"),
        ("db.exec('COMMIT')", "0A000"),
        ("db.exec('BEGIN')", "0A000"),
        ("db.exec('DROP TABLE account')", "0A000"),
        ("db.query('PRAGMA user_version')", "0A000"),
        ("db.query('CALL p()')", "0A000"),
        ("db.exec('DELETE FROM account; COMMIT')", "42601"),
        ("db.exec('ATTACH \"/etc/passwd\" AS x')", "0A000"),
        ("while true do end", "54000"),
        ("while true do pcall(function() while true do end end) end", "54000"),
        ("local s = 'x'; while true do s = s .. s end", "53200"),
        ("local t = {}; for i = 1, 1e9 do t[i] = {i} end", "53200"),
        ("string.rep('x', 2000000000)", "38000"),
        ("local function f() return f() + 1 end; f()", "38000"),
        ("local function f(s) return (string.gsub(s, '.', f)) end; f('x')", "38000"),
        ("('a'):rep(30):find(('a?'):rep(30) .. ('.*'):rep(30) .. 'b')", "54000"),
        // Single operations of the C library must not take unlimited time.
        ("(('a'):rep(2^24)):find(('a'):rep(2^22) .. 'b', 1, true)", "38000"),
        ("(('a'):rep(2^24)):split(('a'):rep(2^22) .. 'b')", "38000"),
        ("(('a'):rep(2^24)):match('[' .. ('b'):rep(2^23) .. 'a]*')", "38000"),
        ("(('a'):rep(2^24)):gmatch('[' .. ('b'):rep(2^23) .. 'a]*')()", "38000"),
        ("(('a'):rep(2^24)):gsub('[' .. ('b'):rep(2^23) .. 'a]*', '')", "38000"),
        ("table.move({}, 1, 2^31 - 2, 2, {})", "38000"),
        ("table.move({}, '1', '2147483646', 2, {})", "38000"),
        ("table.move({}, 0/0, 2, 2, {})", "38000"),
        ("table.move({}, -1/0, 2, 2, {})", "38000"),
        ("table.move({}, 2^40, 2^40 + 2, 2, {})", "38000"),
        (
            "local s, t = ('a'):rep(2^23), {}; for i = 1, 1e5 do t[i] = s .. (i % 2) end; table.sort(t)",
            "53200",
        ),
        // SQL values are limited, although Lua does not account for their memory.
        (
            "local s = ('x'):rep(2^23); db.query('SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9', s, s, s, s, s, s, s, s, s)",
            "53200",
        ),
        (
            "db.query('WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n')",
            "53200",
        ),
        ("db.query('SELECT zeroblob(70000000)')", "53200"),
        ("db.query('SELECT ' .. ('1 +'):rep(500000) .. '1')", "54000"),
    ] {
        let outcome = run(&client, escape).await;
        let text = format!("{escape}: {outcome:?}");
        assert_eq!(state(outcome), expected, "{text}");
    }
    // Memory addresses are not visible.
    let no_addresses = "local meta = setmetatable({}, { __tostring = function() return 'mine' end })
        assert(tostring({}) == 'table' and `{string.rep}` == 'function' and `{meta}{nil}{1}` == 'minenil1')
        assert(string.format('%s %d %s', {}, 7, 'x') == 'table 7 x')
        local list = {3, 1, 2}; table.sort(list); assert(table.concat(list) == '123')
        assert(('a.b'):find('.', 1, true) == 2 and #('a,b'):split(',') == 2)
        assert(('k=v'):match('(%w)=') == 'k' and (('aba'):gsub('a', 'c')) == 'cbc' and ('xy'):gmatch('.')() == 'x')
        assert(table.concat(table.move({1, 2, 3}, 2, 3, 1)) == '233' and table.move({7}, 1, 1, 2, {6})[2] == 7)";
    run(&client, no_addresses).await.unwrap();
    // Deep nesting is rejected when the procedure is created, and does not overflow the stack.
    let deep = format!("return {}1{}", "(".repeat(100_000), ")".repeat(100_000));
    assert_eq!(state(run(&client, &deep).await), "42601");
    assert_eq!(balances(&client).await, [100, 0]);
    node.stop().await;
}

/// Calls in a client's transaction are replayed with it. If the results are the same, the client
/// does not notice. Otherwise the commit fails.
#[tokio::test]
async fn transactions_with_calls_are_replayed() {
    let node = Node::insecure().await;
    let (client, admin) = (bank(&node).await, node.client("fulmar").await);
    let other = node.client("bank").await;
    other.batch_execute("INSERT INTO account VALUES (3, 0, 'c')").await.unwrap();
    let replays = async || {
        let sql = "SELECT replays FROM fulmar.tenant_stats WHERE tenant = 'bank'";
        admin.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let before = replays().await;
    client.batch_execute("BEGIN; CALL transfer(1, 2, 30)").await.unwrap();
    other.batch_execute("UPDATE account SET balance = 7 WHERE id = 3").await.unwrap();
    client.batch_execute("CALL transfer(1, 2, 5); COMMIT").await.unwrap();
    assert!(replays().await > before, "the page of both accounts has been changed by another session");
    assert_eq!(balances(&client).await, [65, 35, 7]);

    // The second call finds an insufficient balance in the replay.
    client.batch_execute("BEGIN; CALL transfer(1, 2, 1); CALL transfer(1, 2, 60)").await.unwrap();
    other.batch_execute("UPDATE account SET balance = 50 WHERE id = 1").await.unwrap();
    assert_eq!(state(client.batch_execute("COMMIT").await), "40001");
    client.batch_execute("ROLLBACK").await.unwrap_or_default();
    assert_eq!(balances(&client).await, [50, 35, 7]);
    node.stop().await;
}

/// The memory of procedures is limited per tenant.
#[tokio::test(flavor = "multi_thread")]
async fn procedure_memory_is_limited_per_tenant() {
    const HOLD_MEMORY: &str = "CREATE PROCEDURE hold() LANGUAGE lua AS $$
        local text = ('x'):rep(48 * 2^20)
        for i = 1, 1e6 do end
        return
    $$";
    // Calls yield as often as possible, so that they overlap on every machine.
    let node =
        Node::on_engine(|config| config.insecure = true, |engine| engine.time_slice = Duration::ZERO).await;
    let greedy = node.database("greedy").await;
    greedy.batch_execute(HOLD_MEMORY).await.unwrap();
    let clients = futures::future::join_all((0..20).map(|_| node.client("greedy"))).await;
    let calls = clients.iter().map(|client| client.batch_execute("CALL hold()"));
    let modest = node.database("modest").await;
    modest.batch_execute(HOLD_MEMORY).await.unwrap();
    let (greedy_calls, modest_call) =
        tokio::join!(futures::future::join_all(calls), modest.batch_execute("CALL hold()"));
    modest_call.unwrap();
    let refused: Vec<_> = greedy_calls.into_iter().filter(Result::is_err).map(state).collect();
    assert!(!refused.is_empty() && refused.len() < 20, "{} calls were rejected", refused.len());
    assert!(refused.iter().all(|state| state == "53200"), "{refused:?}");
    greedy.batch_execute("CALL hold()").await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn statement_timeout_ends_a_procedure() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    let mut config = node.config("bank", "anna");
    config.options("-c statement_timeout=50ms");
    let impatient = connect(&config).await.unwrap();
    let slow = "while true do
        db.query('WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) SELECT count(*) FROM n')
    end";
    for endless in [
        slow,
        "while true do db.query('SELECT 1') end",
        "pcall(function() while true do local x = 1 end end)",
    ] {
        create(&client, endless).await.unwrap();
        assert_eq!(state(impatient.simple_query("CALL p()").await), "57014", "{endless}");
    }
    client.batch_execute("CALL transfer(1, 2, 1)").await.unwrap();
    node.stop().await;
}

/// Calls that change the same rows wait for each other, and none of them fails.
#[tokio::test(flavor = "multi_thread")]
async fn conflicting_calls_are_retried() {
    const CLIENTS: usize = 8;
    const CALLS: i64 = 100;
    let node = Node::insecure().await;
    let client = bank(&node).await;
    client
        .batch_execute(
            "CREATE PROCEDURE count(id INTEGER) LANGUAGE lua AS $$
                 local n = db.query('SELECT balance FROM account WHERE id = $1', id)[1].balance
                 db.exec('UPDATE account SET balance = $2 WHERE id = $1', id, n + 1)
             $$; UPDATE account SET balance = 0",
        )
        .await
        .unwrap();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(node.client("bank").await);
    }
    let calls = clients.into_iter().map(|client| {
        tokio::spawn(async move {
            let call = client.prepare("CALL count($1)").await.unwrap();
            for _ in 0..CALLS {
                client.execute(&call, &[&2i64]).await.unwrap();
            }
        })
    });
    futures::future::try_join_all(calls).await.unwrap();
    assert_eq!(balances(&client).await, [0, CALLS * CLIENTS as i64]);
    node.stop().await;
}

/// CREATE, CALL and DROP interpret names in the same way.
#[tokio::test]
async fn procedure_names_are_folded_as_in_postgres() {
    let node = Node::insecure().await;
    let client = bank(&node).await;
    for (created, stored, called, not_called) in [
        ("Plain", "plain", "PLAIN", "x"),
        ("\u{c4}NDERN", "\u{c4}ndern", "\u{c4}ndern", "\"\u{c4}NDERN\""),
        ("\"Mixed\"", "Mixed", "\"Mixed\"", "mixed"),
        ("\"a\"\"b\"", "a\"b", "\"a\"\"b\"", "\"a\""),
        ("public.f", "f", "f", "g"),
        ("g", "g", "\"public\".G", "other.g"),
    ] {
        let create = format!("CREATE PROCEDURE {created}() LANGUAGE lua AS $$ return $$");
        client.batch_execute(&create).await.unwrap();
        assert_eq!(state(client.batch_execute(&create).await), "42723", "{created}");
        let name = client.query_one("SELECT name FROM fulmar_procedures WHERE name <> 'transfer'", &[]);
        assert_eq!(name.await.unwrap().get::<_, &str>(0), stored);
        for name in [created, called] {
            client.batch_execute(&format!("CALL {name}()")).await.unwrap();
            client.execute(&format!("CALL {name}()"), &[]).await.unwrap();
        }
        let refused = state(client.batch_execute(&format!("CALL {not_called}()")).await);
        assert!(["42883", "42601"].contains(&refused.as_str()), "{not_called}: {refused}");
        client.batch_execute(&format!("DROP PROCEDURE {called}")).await.unwrap();
        assert_eq!(state(client.batch_execute(&format!("CALL {created}()")).await), "42883");
    }
    // Earlier versions stored all names in lower case, quoted or not.
    for (name, stored) in [("\u{c4}NDERN", "\u{e4}ndern"), ("\"Old\"", "old")] {
        client
            .execute("INSERT INTO fulmar_procedures VALUES ($1, '', '', 'return')", &[&stored])
            .await
            .unwrap();
        client.batch_execute(&format!("CALL {name}(); DROP PROCEDURE {name}")).await.unwrap();
        assert_eq!(state(client.batch_execute(&format!("DROP PROCEDURE {name}")).await), "42883");
    }
    assert_eq!(
        state(client.batch_execute("CREATE PROCEDURE x.f() LANGUAGE lua AS $$ return $$").await),
        "0A000"
    );
    client.batch_execute("CALL public.transfer(1, 2, 3)").await.unwrap();
    node.stop().await;
}
