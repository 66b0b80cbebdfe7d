//! `fulmar token`: creates, drops and lists HTTP tokens with SQL statements.

use anyhow::Context;
use serde::Serialize;
use tokio_postgres::Client;

use crate::cli::{TokenAction, TokenArgs};
use crate::client::{connect, server_error};
use crate::output;
use crate::tenant::{SYSTEM_DATABASE, quoted, texts};

/// A new token, for `--json`.
#[derive(Serialize)]
struct CreatedToken<'a> {
    name: &'a str,
    token: &'a str,
}

/// A row of the token list.
#[derive(Serialize)]
struct TokenRow {
    name: String,
    tenant: Option<String>,
    created: String,
    expires: Option<String>,
    admin: bool,
}

/// Runs `fulmar token`.
pub async fn run(arguments: TokenArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    match arguments.action {
        TokenAction::Create { name, tenant, admin, expires } => {
            let statement = create(&name, tenant.as_deref(), admin, expires.as_deref());
            let rows = texts::<1>(&client, &statement).await;
            let rows = rows.with_context(|| format!("cannot create token \"{name}\""))?;
            let [token] = rows.first().context("the server returned no token")?;
            if arguments.json {
                output::json(&CreatedToken { name: &name, token })
            } else {
                output::line(token)
            }
        }
        TokenAction::Drop { names } => drop_all(&client, &names, arguments.json).await,
        TokenAction::List => list(&client, arguments.json).await,
    }
}

fn create(name: &str, tenant: Option<&str>, is_admin: bool, expires: Option<&str>) -> String {
    let mut statement = format!("CREATE TOKEN {}", quoted(name));
    tenant.iter().for_each(|tenant| statement.push_str(&format!(" FOR DATABASE {}", quoted(tenant))));
    if is_admin {
        statement.push_str(" FOR ADMIN");
    }
    expires
        .iter()
        .for_each(|time| statement.push_str(&format!(" EXPIRES IN '{}'", time.replace('\'', "''"))));
    statement
}

async fn drop_all(client: &Client, names: &[String], json: bool) -> anyhow::Result<()> {
    for name in names {
        let dropped = client.batch_execute(&format!("DROP TOKEN {}", quoted(name))).await;
        dropped
            .map_err(|error| server_error(&error))
            .with_context(|| format!("cannot drop token \"{name}\""))?;
        if !json {
            output::line(&format!("dropped {name}"))?;
        }
    }
    if json { output::json(&names) } else { Ok(()) }
}

async fn list(client: &Client, json: bool) -> anyhow::Result<()> {
    // `texts` accepts no NULLs: they are sent as empty strings.
    let sql = "SELECT name, coalesce(database, ''), CAST(created AS TEXT), coalesce(CAST(expires AS TEXT), ''), \
               CASE WHEN admin THEN 'yes' ELSE '' END \
               FROM fulmar.tokens ORDER BY name";
    let non_empty = |text: String| (!text.is_empty()).then_some(text);
    let rows = texts(client, sql).await?.into_iter();
    let tokens: Vec<TokenRow> = rows
        .map(|[name, tenant, created, expires, admin]| TokenRow {
            name,
            tenant: non_empty(tenant),
            created,
            expires: non_empty(expires),
            admin: !admin.is_empty(),
        })
        .collect();
    if json {
        return output::json(&tokens);
    }
    let mut table = output::table(["token", "tenant", "created", "expires"]);
    for token in &tokens {
        let all = if token.admin { "(all, admin)" } else { "(all)" };
        let tenant = token.tenant.as_deref().unwrap_or(all);
        table.add_row([&*token.name, tenant, &*token.created, token.expires.as_deref().unwrap_or("never")]);
    }
    output::line(&table.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_times_are_quoted() {
        assert_eq!(create("a\"b", None, false, None), "CREATE TOKEN \"a\"\"b\"");
        let admin = create("a", None, true, Some("12h"));
        assert_eq!(admin, "CREATE TOKEN \"a\" FOR ADMIN EXPIRES IN '12h'");
        let statement = create("a", Some("shop"), false, Some("9'0d"));
        assert_eq!(statement, "CREATE TOKEN \"a\" FOR DATABASE \"shop\" EXPIRES IN '9''0d'");
    }
}
