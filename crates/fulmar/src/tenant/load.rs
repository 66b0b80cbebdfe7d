//! `fulmar tenant load`: loads a file into a table with COPY.

use std::time::Instant;

use anyhow::Context;
use bytes::Bytes;
use futures::pin_mut;
use serde::Serialize;
use tokio_postgres::Client;

use super::{open, quoted, send_file, server_error};
use crate::cli::LoadArgs;
use crate::output;

/// The result, for `--json`.
#[derive(Serialize)]
struct Loaded<'a> {
    tenant: &'a str,
    table: &'a str,
    rows: u64,
    bytes: u64,
    seconds: f64,
}

/// Loads all rows of the file, or none.
pub async fn run(client: &Client, arguments: &LoadArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let LoadArgs { name, table, file, .. } = arguments;
    let (mut input, length) = open(file).await?;
    // COPY returns when the server has received the rows. Only COMMIT confirms that they are
    // durable.
    client.batch_execute("BEGIN").await.map_err(|error| server_error(&error))?;
    let sink = client
        .copy_in::<_, Bytes>(&statement(arguments))
        .await
        .map_err(|error| server_error(&error))
        .with_context(|| format!("no rows were loaded into table \"{table}\" of tenant \"{name}\""))?;
    pin_mut!(sink);
    let bar = output::byte_progress("loading", length);
    let (bytes, copied) = send_file(&mut input, file, sink.as_mut(), &bar).await;
    let rows = match copied {
        Ok(()) => commit(client, sink.finish().await).await.map_err(|error| server_error(&error)),
        Err(error) => Err(error),
    };
    bar.finish_and_clear();
    let rows =
        rows.with_context(|| format!("no rows were loaded into table \"{table}\" of tenant \"{name}\""))?;
    let seconds = began.elapsed().as_secs_f64();
    if json {
        return output::json(&Loaded { tenant: name, table, rows, bytes, seconds });
    }
    let rate = bytes as f64 / seconds / 1e6;
    output::line(&format!("loaded {rows} rows into {table} of {name}: {seconds:.1} s, {rate:.0} MB/s"))
}

/// Commits the transaction, and returns the number of rows copied.
async fn commit(
    client: &Client,
    copied: Result<u64, tokio_postgres::Error>,
) -> Result<u64, tokio_postgres::Error> {
    let rows = copied?;
    client.batch_execute("COMMIT").await?;
    Ok(rows)
}

fn statement(arguments: &LoadArgs) -> String {
    let LoadArgs { table, file, columns, csv, header, delimiter, null, .. } = arguments;
    let columns: Vec<String> = columns.iter().map(|column| quoted(column)).collect();
    let columns = if columns.is_empty() { String::new() } else { format!(" ({})", columns.join(", ")) };
    let csv = *csv || file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    let mut options = vec![if csv { "FORMAT csv".to_owned() } else { "FORMAT text".to_owned() }];
    if *header {
        options.push("HEADER".to_owned());
    }
    let text = |text: &str| format!("'{}'", text.replace('\'', "''"));
    options.extend(delimiter.as_deref().map(|delimiter| format!("DELIMITER {}", text(delimiter))));
    options.extend(null.as_deref().map(|null| format!("NULL {}", text(null))));
    format!("COPY {}{columns} FROM STDIN ({})", quoted(table), options.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_statement_has_the_format_of_the_file_extension() {
        let arguments = |file: &str| LoadArgs {
            name: "shop".into(),
            table: "t\"x".into(),
            file: file.into(),
            columns: Vec::new(),
            csv: false,
            header: false,
            delimiter: None,
            null: None,
        };
        assert_eq!(statement(&arguments("rows.txt")), r#"COPY "t""x" FROM STDIN (FORMAT text)"#);
        let columns = vec!["a".to_owned(), "B".to_owned()];
        let (delimiter, null) = (Some("'".to_owned()), Some(String::new()));
        let all = LoadArgs { columns, header: true, delimiter, null, ..arguments("rows.CSV") };
        assert_eq!(
            statement(&all),
            r#"COPY "t""x" ("a", "B") FROM STDIN (FORMAT csv, HEADER, DELIMITER '''', NULL '')"#
        );
    }
}
