//! The rooms of a node, put together.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fulmar_engine::{Config, Engine};
use fulmar_gateway::http::{self, HttpServer};
use fulmar_gateway::{Gateway, GatewayConfig};
use fulmar_meta::{Catalog, Embedded};
use rustls::ServerConfig;

use super::data::DataDirectory;
use super::{store, superuser};
use crate::cli::StartArgs;
use crate::size::Bytes;

/// The metadata store's file in the data directory.
pub const METADATA_FILE: &str = "meta.db";
/// Where large answers wait; the engine makes it, and keeps its own temporary files there.
const TEMPORARY_DIRECTORY: &str = "tmp";
/// How long a slow reader of metrics can hold up the end of the node.
const HTTP_GRACE: Duration = Duration::from_secs(2);

/// A node that takes connections.
pub struct Node {
    engine: Arc<Engine>,
    gateway: Gateway,
    http: HttpServer,
}

impl Node {
    /// Recovers and begins to listen.
    pub async fn start(
        arguments: &StartArgs,
        data: &DataDirectory,
        memory: Bytes,
        tls: Option<Arc<ServerConfig>>,
    ) -> anyhow::Result<Self> {
        let metadata = Embedded::open(&data.path().join(METADATA_FILE))?;
        let catalog = Catalog::open(Arc::new(metadata)).await?;
        let store = store::open(data.path(), arguments.store.as_ref()).await?;
        let mut config = Config::new(data.path(), memory.0);
        config.live = Some(catalog.partitions().iter().map(|partition| partition.id).collect());
        config.store = Some(store);
        config.disk_reserve_bytes = arguments.disk_reserve.map(|reserve| reserve.0);
        let engine = Engine::start(config).await.context("cannot start the engine")?;
        forget_unfinished(&engine, &catalog).await?;
        if !arguments.insecure {
            superuser::ensure_password(&catalog, data.path()).await?;
        }
        let mut config = GatewayConfig::new(arguments.sql);
        config.tls = tls;
        config.insecure = arguments.insecure;
        config.slow_statement = limit(arguments.slow_statement);
        config.temporary_directory = data.path().join(TEMPORARY_DIRECTORY);
        let gateway = Gateway::start(config, engine.clone(), catalog)
            .await
            .with_context(|| format!("cannot listen on --sql {}", arguments.sql))?;
        let http = http::serve(arguments.http, &gateway)
            .await
            .with_context(|| format!("cannot listen on --http {}", arguments.http))?;
        tracing::info!(%memory, insecure = arguments.insecure, "the node takes connections");
        Ok(Self { engine, gateway, http })
    }

    /// Where clients connect; the port is the real one if 0 was asked for.
    pub fn sql_addr(&self) -> SocketAddr {
        self.gateway.local_addr()
    }

    /// Where /metrics and /healthz are.
    pub fn http_addr(&self) -> SocketAddr {
        self.http.local_addr()
    }

    /// Takes no more connections, lets running statements end within the gateway's bound, flushes, stops.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        self.gateway.shutdown().await;
        match tokio::time::timeout(HTTP_GRACE, self.http.shutdown()).await {
            Ok(stopped) => stopped.context("the HTTP server did not stop cleanly")?,
            Err(_) => tracing::warn!("a client of the HTTP server was cut off"),
        }
        self.engine.shutdown().await.context("the engine did not stop cleanly; nothing acknowledged is lost")
    }
}

/// A time of 0 is none.
fn limit(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// Drops what a crash left half made or half dropped: nobody was ever told that it is there.
async fn forget_unfinished(engine: &Engine, catalog: &Catalog) -> anyhow::Result<()> {
    for tenant in catalog.unfinished() {
        tracing::info!(tenant = tenant.name, state = ?tenant.state, "dropping what a crash left behind");
        engine.drop_partition(tenant.partition).await?;
        catalog.finish_drop(&tenant).await?;
    }
    Ok(())
}
