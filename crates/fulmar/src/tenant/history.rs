//! `fulmar tenant history`: lists the restore points of a tenant, which are also its branch points.

use serde::Serialize;
use tokio_postgres::Client;

use super::texts;
use crate::output;
use crate::size::Bytes;

/// A restore point.
#[derive(Serialize)]
struct RestorePoint {
    time: String,
    size_bytes: u64,
    version: u64,
    lineage: String,
}

/// Lists the restore points in order of time.
pub async fn list(client: &Client, json: bool) -> anyhow::Result<()> {
    let sql = "SELECT time, size_bytes, version, lineage FROM fulmar.history ORDER BY 1, 3";
    let point = |[time, size_bytes, version, lineage]: [String; 4]| {
        anyhow::Ok(RestorePoint { time, size_bytes: size_bytes.parse()?, version: version.parse()?, lineage })
    };
    let points = texts(client, sql).await?.into_iter().map(point);
    let points: Vec<RestorePoint> = points.collect::<anyhow::Result<_>>()?;
    if json {
        return output::json(&points);
    }
    let mut table = output::table(["time", "size", "version", "lineage"]);
    table.add_rows(points.into_iter().map(|point| {
        let size = Bytes(point.size_bytes).to_string();
        [point.time, size, point.version.to_string(), point.lineage]
    }));
    output::line(&table.to_string())
}
