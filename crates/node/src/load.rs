//! Load reports and statistics of statements: of this node, and of all nodes of the cluster.
//!
//! Reports are requested, and not sent with heartbeats: only the controller and operators need
//! them.

use std::time::Duration;

use fulmar_control::report::{MoveReport, NodeReport};
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::StatementReport;
use fulmar_transport::Error as TransportError;
use tokio::time::timeout;

use crate::Node;
use crate::messages::{self, Answer, Opening, Request};
use crate::owners::KnownNode;

/// How long another node may take to report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a report: some hundred bytes for each partition that was used or is in memory, or
/// for each statement.
const MAX_REPORT_BYTES: usize = 64 << 20;

/// What a load report contains about accesses per key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observation {
    /// The most accessed keys of the last window.
    pub keys: bool,
    /// Accesses are to be counted for a window from now (E-Store's second phase).
    pub count: bool,
}

impl Node {
    /// What this node and its partitions did in the last second, with their most accessed keys if
    /// `with_keys` and if they are monitored. Fails while the node starts.
    pub fn load_report(&self, with_keys: bool) -> Result<NodeReport> {
        self.own_report(Observation { keys: with_keys, count: false })
    }

    pub(crate) fn own_report(&self, observation: Observation) -> Result<NodeReport> {
        let partitions = self.partitions()?;
        if observation.count {
            partitions.request_keys();
        }
        let mut report = partitions.load_report(observation.keys);
        let costs = self.move_costs();
        report.moves = MoveReport {
            fixed_s: costs.fixed_ms.map(|ms| ms / 1e3),
            site_bytes_per_s: costs.site_bytes_per_s,
            wan_bytes_per_s: costs.wan_bytes_per_s,
        };
        Ok(report)
    }

    /// The reports of all nodes that live, by name, or why there is none: one that does not answer
    /// within 2 s has none.
    pub async fn load_reports(&self, with_keys: bool) -> Vec<(String, Result<NodeReport>)> {
        self.observe_load(|_| Observation { keys: with_keys, count: false }).await
    }

    /// Like [`Node::load_reports`], with what is to be known about the keys of each node.
    pub(crate) async fn observe_load(
        &self,
        observation: impl Fn(&str) -> Observation,
    ) -> Vec<(String, Result<NodeReport>)> {
        let nodes = self.alive_nodes().into_iter().map(|known| (observation(&known.name), known));
        let reports = nodes.map(|(observation, known)| async move {
            let report = match known.id == self.id() {
                true => self.own_report(observation),
                false => {
                    let Observation { keys, count } = observation;
                    let asked = self.request_report(&known, Request::LoadReport { keys, count }).await;
                    asked.and_then(|answer| match answer {
                        Answer::LoadReport(report) => Ok(report),
                        _ => Err(no_report(&known, "it sent another answer")),
                    })
                }
            };
            (known.name, report)
        });
        futures::future::join_all(reports).await
    }

    /// The statistics of statements of all nodes that live, as [`Node::load_reports`]: of these
    /// partitions, or of all.
    pub async fn statement_reports(
        &self,
        partitions: Option<&[u64]>,
    ) -> Vec<(String, Result<StatementReport>)> {
        let reports = self.alive_nodes().into_iter().map(|known| async move {
            let report = match known.id == self.id() {
                true => self.partitions().map(|of| of.statement_report(partitions)),
                false => {
                    let request = Request::StatementReport { partitions: partitions.map(<[u64]>::to_vec) };
                    self.request_report(&known, request).await.and_then(|answer| match answer {
                        Answer::StatementReport(report) => Ok(report),
                        _ => Err(no_report(&known, "it sent another answer")),
                    })
                }
            };
            (known.name, report)
        });
        futures::future::join_all(reports).await
    }

    fn alive_nodes(&self) -> Vec<KnownNode> {
        self.owners().nodes().into_iter().filter(|known| known.alive().is_some()).collect()
    }

    async fn request_report(&self, known: &KnownNode, request: Request) -> Result<Answer> {
        let request = async {
            let mut stream = self.open_stream(known.id, &Opening::Control { request }).await?;
            stream.set_max_message_bytes(MAX_REPORT_BYTES);
            let answer = stream.receive().await?.ok_or(TransportError::Protocol("no report"))?;
            messages::decode::<Answer>(&answer).map_err(TransportError::Refused)
        };
        match timeout(REPORT_TIMEOUT, request).await {
            Ok(Ok(answer)) => answer.into_result(),
            Ok(Err(error)) => Err(no_report(known, &error.to_string())),
            Err(_) => Err(no_report(known, &format!("no answer within {REPORT_TIMEOUT:?}"))),
        }
    }
}

fn no_report(known: &KnownNode, cause: &str) -> Error {
    let message = format!("node \"{}\" does not report its load: {cause}", known.name);
    Error::new(sqlstate::CANNOT_CONNECT_NOW, message).hint("Check the nodes with \"fulmar node list\".")
}
