//! The vote as one call: a Lua procedure at Fulmar, a PL/pgSQL function at PostgreSQL. It returns a
//! row if the vote was counted, and none if the telephone has no votes left.

use crate::client::{Client, Error, Statement, Type};
use crate::workload::Dialect;

pub(super) async fn create(client: &mut Client, dialect: Dialect, votes: u32) -> Result<(), Error> {
    let text = match dialect {
        Dialect::Fulmar => lua(votes),
        Dialect::Postgres => plpgsql(votes),
    };
    client.query(&text).await.map(drop)
}

pub(super) async fn prepare(client: &mut Client, dialect: Dialect) -> Result<Statement, Error> {
    let sql = match dialect {
        Dialect::Fulmar => "CALL vote($1, $2, $3)",
        Dialect::Postgres => "SELECT * FROM vote($1, $2, $3)",
    };
    client.prepare(sql, &[Type::Varchar, Type::Varchar, Type::Int4]).await
}

fn lua(votes: u32) -> String {
    format!(
        "CREATE OR REPLACE PROCEDURE vote(phone TEXT, code TEXT, contestant INTEGER) RETURNS TABLE (counted INTEGER)
         LANGUAGE lua AS $$
             if #db.query('SELECT 1 AS n FROM contestants WHERE contestant_number = $1', contestant) == 0 then
                 db.abort('no such contestant')
             end
             if #db.query('SELECT 1 AS n FROM votes WHERE phone_number = $1', phone) >= {votes} then
                 return {{}}
             end
             local counted = db.exec('INSERT INTO votes (phone_number, state, contestant_number) ' ..
                 'SELECT $1, state, $2 FROM area_code_state WHERE area_code = $3', phone, contestant, code)
             if counted ~= 1 then db.abort('no such area code') end
             return {{{{1}}}}
         $$"
    )
}

fn plpgsql(votes: u32) -> String {
    format!(
        "CREATE OR REPLACE FUNCTION vote(phone TEXT, code TEXT, contestant INTEGER) RETURNS SETOF INTEGER
         LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM 1 FROM contestants WHERE contestant_number = contestant;
             IF NOT FOUND THEN RAISE 'no such contestant'; END IF;
             IF (SELECT count(*) FROM votes WHERE phone_number = phone) >= {votes} THEN RETURN; END IF;
             INSERT INTO votes (phone_number, state, contestant_number)
                 SELECT phone, state, contestant FROM area_code_state WHERE area_code = code;
             IF NOT FOUND THEN RAISE 'no such area code'; END IF;
             RETURN NEXT 1;
         END $$"
    )
}
