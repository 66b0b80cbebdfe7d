//! Load reports: of this node, and of all nodes of the cluster.
//!
//! Reports are requested, and not sent with heartbeats: only the controller and operators need
//! them.

use std::time::Duration;

use fulmar_control::report::NodeReport;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_transport::Error as TransportError;
use tokio::time::timeout;

use crate::Node;
use crate::messages::{self, Answer, Opening, Request};
use crate::owners::KnownNode;

/// How long another node may take to report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a report: some hundred bytes for each partition that was used or is in memory.
const MAX_REPORT_BYTES: usize = 64 << 20;

impl Node {
    /// What this node and its partitions did in the last second, with their most accessed keys if
    /// `with_keys` and if they are monitored. Fails while the node starts.
    pub fn load_report(&self, with_keys: bool) -> Result<NodeReport> {
        Ok(self.partitions()?.load_report(with_keys))
    }

    /// The reports of all nodes that live, by name, or why there is none: one that does not answer
    /// within 2 s has none.
    pub async fn load_reports(&self, with_keys: bool) -> Vec<(String, Result<NodeReport>)> {
        let alive = self.owners().nodes().into_iter().filter(|known| known.alive().is_some());
        let reports = alive.map(|known| async move {
            let report = match known.id == self.id() {
                true => self.load_report(with_keys),
                false => self.request_report(&known, with_keys).await,
            };
            (known.name, report)
        });
        futures::future::join_all(reports).await
    }

    async fn request_report(&self, known: &KnownNode, with_keys: bool) -> Result<NodeReport> {
        let request = async {
            let request = Request::LoadReport { keys: with_keys };
            let mut stream = self.open_stream(known.id, &Opening::Control { request }).await?;
            stream.set_max_message_bytes(MAX_REPORT_BYTES);
            let answer = stream.receive().await?.ok_or(TransportError::Protocol("no load report"))?;
            messages::decode::<Answer>(&answer).map_err(TransportError::Refused)
        };
        let cause = match timeout(REPORT_TIMEOUT, request).await {
            Ok(Ok(answer)) => match answer.into_result()? {
                Answer::LoadReport(report) => return Ok(report),
                _ => "it sent another answer".to_owned(),
            },
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {REPORT_TIMEOUT:?}"),
        };
        let message = format!("node \"{}\" does not report its load: {cause}", known.name);
        Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, message)
            .hint("Check the nodes with \"fulmar node list\"."))
    }
}
