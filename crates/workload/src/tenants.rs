//! Creates the databases of many tenants.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::Target;
use crate::client::{Client, Error};

/// Number of connections that create databases concurrently. Each creates a share of them.
const CONCURRENT_CREATES: u32 = 8;

/// `duplicate_database`
const DUPLICATE_DATABASE: &str = "42P04";

/// Returns `count` names: the prefix followed by a number of at least four digits.
pub fn names(prefix: &str, count: u32) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}{number:04}")).collect()
}

/// Creates the databases that do not exist yet, through the database of `target`. Calls
/// `on_created` with the number of databases done so far.
pub async fn create(
    target: &Target,
    databases: &[String],
    on_created: impl Fn(u64) + Sync,
) -> anyhow::Result<()> {
    let done = AtomicU64::new(0);
    let per_connection = databases.len().div_ceil(CONCURRENT_CREATES as usize).max(1);
    let (done, on_created) = (&done, &on_created);
    stream::iter(databases.chunks(per_connection))
        .map(|databases| async move {
            let client = Client::connect(target).await;
            let mut client = client.with_context(|| format!("could not connect to {target}"))?;
            for database in databases {
                create_one(&mut client, database).await?;
                on_created(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT_CREATES as usize)
        .try_collect()
        .await
}

async fn create_one(client: &mut Client, database: &str) -> anyhow::Result<()> {
    match client.query(&format!("CREATE DATABASE {database}")).await {
        Ok(_) => Ok(()),
        Err(Error::Server { sqlstate, .. }) if sqlstate == DUPLICATE_DATABASE => Ok(()),
        Err(error) => Err(error).with_context(|| format!("could not create database {database}")),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_have_at_least_four_digits() {
        let names = super::names("t_", 3);
        assert_eq!(names, ["t_0000", "t_0001", "t_0002"]);
        assert_eq!(super::names("t_", 10_001)[10_000], "t_10000");
    }
}
