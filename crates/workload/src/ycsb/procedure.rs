//! The YCSB transaction as one call: a Lua procedure at Fulmar, a PL/pgSQL function at PostgreSQL.
//!
//! Both get the tables (a digit per operation), the position of the update, the value to write, and
//! ten keys. Both read whole rows, update one field, and fail if a row does not exist.

use super::schema::{TABLES, fields};
use crate::client::{Client, Error, Statement, Type};
use crate::workload::Dialect;

/// Operations per call, as in ElasTraS.
pub(super) const OPERATIONS: u32 = 10;

/// Creates or replaces the procedure.
pub(super) async fn create(client: &mut Client, dialect: Dialect) -> Result<(), Error> {
    let text = match dialect {
        Dialect::Fulmar => lua(),
        Dialect::Postgres => plpgsql(),
    };
    client.query(&text).await.map(drop)
}

/// Prepares the call. Its parameters are the tables, the position, the value and the keys.
pub(super) async fn prepare(client: &mut Client, dialect: Dialect) -> Result<Statement, Error> {
    let mut types = vec![Type::Varchar, Type::Int4, Type::Varchar];
    types.resize(types.len() + OPERATIONS as usize, Type::Int4);
    let parameters = (1..=types.len()).map(|n| format!("${n}")).collect::<Vec<_>>().join(", ");
    client.prepare(&format!("{} ycsb_transaction({parameters})", dialect.call()), &types).await
}

fn keys(suffix: &str) -> String {
    (1..=OPERATIONS).map(|n| format!("k{n}{suffix}")).collect::<Vec<_>>().join(", ")
}

fn lua() -> String {
    let fields = fields(", ");
    let list = |text: &dyn Fn(&str) -> String| TABLES.map(|table| format!("\"{}\"", text(table))).join(", ");
    let read = list(&|table| format!("SELECT {fields} FROM {table} WHERE id = $1"));
    let update = list(&|table| format!("UPDATE {table} SET field0 = $1 WHERE id = $2"));
    format!(
        "CREATE OR REPLACE PROCEDURE ycsb_transaction(tables TEXT, place INTEGER, value TEXT, {}) LANGUAGE lua AS $$
             local keys = {{{}}}
             local read = {{{read}}}
             local update = {{{update}}}
             for i = 1, {OPERATIONS} do
                 local t, found = string.byte(tables, i) - 47, 0
                 if i == place then
                     found = db.exec(update[t], value, keys[i])
                 else
                     found = #db.query(read[t], keys[i])
                 end
                 if found ~= 1 then db.abort('a row does not exist') end
             end
         $$",
        keys(" INTEGER"),
        keys(""),
    )
}

fn plpgsql() -> String {
    let fields = fields(", ");
    let branches = |statement: &dyn Fn(&str) -> String| {
        let cases = TABLES.iter().enumerate();
        cases.map(|(digit, table)| format!("WHEN '{digit}' THEN {};\n", statement(table))).collect::<String>()
    };
    let read = branches(&|table| format!("SELECT {fields} INTO STRICT line FROM {table} WHERE id = keys[i]"));
    let update = branches(&|table| format!("UPDATE {table} SET field0 = value WHERE id = keys[i]"));
    format!(
        "CREATE OR REPLACE FUNCTION ycsb_transaction(tables TEXT, place INTEGER, value TEXT, {}) RETURNS void
         LANGUAGE plpgsql AS $$
         DECLARE
             keys INTEGER[] := ARRAY[{}];
             line RECORD;
         BEGIN
             FOR i IN 1..{OPERATIONS} LOOP
                 IF i = place THEN
                     CASE substr(tables, i, 1) {update} END CASE;
                 ELSE
                     CASE substr(tables, i, 1) {read} END CASE;
                 END IF;
             END LOOP;
         END $$",
        keys(" INTEGER"),
        keys(""),
    )
}
