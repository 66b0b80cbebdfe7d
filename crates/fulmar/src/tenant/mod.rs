//! `fulmar tenant`: the administration statements, for those who would rather not write SQL.
//!
//! It connects as any client would, to the database `fulmar` of the server (`load`: to the tenant's), so it needs no
//! more rights and no other port than psql does.

mod load;

use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage};

use crate::cli::{ServerArgs, TenantAction, TenantArgs};
use crate::output;

/// The database that takes administration statements.
const SYSTEM_DATABASE: &str = "fulmar";

/// From so many tenants on, a bar shows how far it is.
const WORTH_A_BAR: usize = 20;

/// What was done, for scripts.
#[derive(Serialize)]
struct Done<'a> {
    #[serde(rename = "tenant")]
    name: &'a str,
    done: &'static str,
}

/// A line of the list.
#[derive(Serialize)]
struct Listed {
    #[serde(rename = "tenant")]
    name: String,
    owner: String,
}

/// Runs `fulmar tenant`.
pub async fn run(arguments: TenantArgs) -> anyhow::Result<()> {
    let database = match &arguments.action {
        TenantAction::Load(load) => &load.name,
        _ => SYSTEM_DATABASE,
    };
    let client = connect(&arguments.server, database).await?;
    let json = arguments.json;
    match arguments.action {
        TenantAction::Create { names, owner, template } => {
            let clauses = create_clauses(owner.as_deref(), template.as_deref());
            let statement = |name: &str| format!("CREATE DATABASE {}{clauses}", quoted(name));
            for_each(&client, &names, statement, "created", json).await
        }
        TenantAction::Drop { names } => {
            for_each(&client, &names, |name| format!("DROP DATABASE {}", quoted(name)), "dropped", json).await
        }
        TenantAction::Rename { from, to } => {
            let statement = |_: &str| format!("ALTER DATABASE {} RENAME TO {}", quoted(&from), quoted(&to));
            for_each(&client, std::slice::from_ref(&from), statement, "renamed", json).await
        }
        TenantAction::List => list(&client, json).await,
        TenantAction::Load(arguments) => load::run(&client, &arguments, json).await,
    }
}

/// Runs a statement for each name, in order; the first error ends it.
async fn for_each(
    client: &Client,
    names: &[String],
    statement: impl Fn(&str) -> String,
    done: &'static str,
    json: bool,
) -> anyhow::Result<()> {
    let bar = (names.len() >= WORTH_A_BAR).then(|| output::progress(done, names.len() as u64));
    for name in names {
        client
            .batch_execute(&statement(name))
            .await
            .map_err(|error| server_error(&error))
            .with_context(|| format!("tenant \"{name}\" was not {done}"))?;
        match &bar {
            Some(bar) => bar.inc(1),
            None if !json => output::line(&format!("{done} {name}"))?,
            None => {}
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
        output::line(&format!("{done} {} tenants", names.len()))?;
    }
    if json {
        output::json(&names.iter().map(|name| Done { name, done }).collect::<Vec<_>>())?;
    }
    Ok(())
}

async fn list(client: &Client, json: bool) -> anyhow::Result<()> {
    let sql = "SELECT datname, pg_catalog.pg_get_userbyid(datdba) FROM pg_catalog.pg_database ORDER BY 1";
    let messages = client.simple_query(sql).await.map_err(|error| server_error(&error))?;
    let mut tenants: Vec<Listed> = Vec::new();
    for message in messages {
        if let SimpleQueryMessage::Row(row) = message {
            let column = |index| row.try_get(index).ok().flatten().map(str::to_owned);
            let (name, owner) =
                column(0).zip(column(1)).context("the server answered a list without names")?;
            tenants.push(Listed { name, owner });
        }
    }
    if json {
        return output::json(&tenants);
    }
    let mut table = output::table(["tenant", "owner"]);
    table.add_rows(tenants.iter().map(|tenant| [&tenant.name, &tenant.owner]));
    output::line(&table.to_string())
}

async fn connect(arguments: &ServerArgs, database: &str) -> anyhow::Result<Client> {
    let mut config: Config =
        arguments.server.parse().context("cannot read --server; write postgres://USER:PASSWORD@HOST:PORT")?;
    config.dbname(database).application_name("fulmar tenant");
    if let Some(password) = password(&config, arguments.password_file.as_deref())? {
        config.password(password);
    }
    let (client, connection) = config
        .connect(NoTls)
        .await
        .map_err(|error| server_error(&error))
        .context("cannot connect; is the node running, and is --server its --sql address?")?;
    // The connection works until the client is dropped; what goes wrong with it the client reports.
    tokio::spawn(connection);
    Ok(client)
}

/// The password file's, else what the URL holds (nothing to add), else PGPASSWORD's.
fn password(config: &Config, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    if let Some(file) = file {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the password file {}", file.display()))?;
        return Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()));
    }
    if config.get_password().is_some() {
        return Ok(None);
    }
    match std::env::var("PGPASSWORD") {
        Ok(password) => Ok(Some(password)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => bail!("PGPASSWORD is not UTF-8; use --password-file"),
    }
}

/// What the server said, with its hint; else what became of the connection.
fn server_error(error: &tokio_postgres::Error) -> anyhow::Error {
    let Some(said) = error.as_db_error() else {
        let cause = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
        return anyhow::anyhow!("{error}{cause}");
    };
    match said.hint() {
        Some(hint) => anyhow::anyhow!("{} ({}); {hint}", said.message(), said.code().code()),
        None => anyhow::anyhow!("{} ({})", said.message(), said.code().code()),
    }
}

fn create_clauses(owner: Option<&str>, template: Option<&str>) -> String {
    let clause = |word: &str, name: Option<&str>| {
        name.map(|name| format!(" {word} {}", quoted(name))).unwrap_or_default()
    };
    format!("{}{}", clause("OWNER", owner), clause("TEMPLATE", template))
}

/// As an SQL identifier.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        assert_eq!(quoted("shop"), "\"shop\"");
        assert_eq!(quoted("a\"; DROP DATABASE \"b"), "\"a\"\"; DROP DATABASE \"\"b\"");
        assert_eq!(create_clauses(None, None), "");
        assert_eq!(create_clauses(Some("o'h"), Some("t")), " OWNER \"o'h\" TEMPLATE \"t\"");
    }

    #[test]
    fn the_password_file_comes_first_and_loses_its_line_break() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("password");
        std::fs::write(&file, " se cret \r\n").unwrap();
        let config: Config = "postgres://a:inurl@h".parse().unwrap();
        assert_eq!(password(&config, Some(&file)).unwrap().as_deref(), Some(" se cret "));
        assert_eq!(password(&config, None).unwrap(), None);
        assert!(password(&config, Some(directory.path())).is_err());
    }
}
