//! The forecasts of a controller.
//!
//! A thread per term has the series ([`SeriesSet`]). It gets the picture of each round, and publishes
//! an outlook and what is shown. A round never waits for it: while it is busy, pictures are dropped,
//! and a step has fewer values. It has the lowest priority, and fits methods for at most a tenth of
//! the time.
//!
//! **The next controller** begins with the series: their newest four days, as texts of two characters
//! per value ([`fulmar_control::forecast::stored`]), are records in the metadata store. Objects in a
//! common store would need an owner, a format and a collector, and not every cluster has one. The
//! records are bounded:
//!
//! record | series | size | written
//! --- | --- | --- | ---
//! `control/forecast/cluster` | 1 | 13 kB | every 5 steps, such as minutes
//! `control/forecast/nodes/N` | 100 each, of at most 1,000 | 100 kB | every 15 steps
//! `control/forecast/tenants/N` | 100 each, of at most 1,000 | 100 kB | every 15 steps
//!
//! A round writes at most one of them. What was not written yet, and the time without a controller,
//! are a hole in the series. A record that cannot be read is ignored and replaced.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use fulmar_cluster::metadata;
use fulmar_cluster::records::{decode, encode};
use fulmar_control::forecast::series::{MethodReport, SeriesKind, SeriesReport};
use fulmar_control::forecast::set::SeriesSet;
use fulmar_control::forecast::stored::StoredSeries;
use fulmar_control::picture::Picture;
use fulmar_control::policy::Outlook;
use fulmar_elastic::settings::ControlSettings;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::cluster::ForecastError;
use fulmar_transport::Error as TransportError;
use parking_lot::{Mutex, RwLock};
use tokio::time::timeout;

use super::records::{FORECAST_PREFIX, SeriesRecord};
use crate::Node;
use crate::messages::{self, Answer, Opening, Request};

/// Bounds of the horizon, in steps. A plan over time adds a node only if that pays within the
/// horizon.
const MIN_HORIZON: f64 = 15.0;
const MAX_HORIZON: f64 = 60.0;
/// Pictures that wait for the thread.
const MAX_WAITING: usize = 2;
/// The share of a round that fits may take.
const FIT_SHARE: f64 = 0.1;
const MIN_FIT_TIME: Duration = Duration::from_millis(10);
/// Nice value of the thread.
const NICENESS: i32 = 19;
/// An outlook is not used if its newest value is older than this number of steps.
const MAX_AGE_STEPS: f64 = 5.0;
/// Steps between two records of the cluster's series, and of the others'.
const SAVE_STEPS: u64 = 5;
const SAVE_COARSE_STEPS: u64 = 3;
/// Series in a record.
const MAX_RECORD_SERIES: usize = 100;
/// How long the controller may take to answer another node, and the maximum size of its answer: some
/// kilobytes per series.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// What the thread has published.
#[derive(Default)]
struct Published {
    /// The end of the newest step.
    at_s: f64,
    outlook: Outlook,
    cluster: Option<SeriesReport>,
    others: Arc<Vec<SeriesReport>>,
}

/// The forecasts of a term, for rounds and for clients.
#[derive(Default)]
pub(super) struct Forecasts {
    published: RwLock<Published>,
    /// The records that are to be written; `None` if they are to be deleted.
    unsaved: Mutex<BTreeMap<String, Option<Vec<u8>>>>,
}

impl Forecasts {
    /// All series, the cluster's first.
    fn reports(&self) -> Vec<SeriesReport> {
        let published = self.published.read();
        published.cluster.iter().chain(published.others.iter()).cloned().collect()
    }

    /// The error of each method for the cluster's series.
    fn errors(&self) -> Vec<ForecastError> {
        let published = self.published.read();
        let Some(report) = &published.cluster else { return Vec::new() };
        let error = |of: &MethodReport| {
            Some(ForecastError { method: of.method.clone(), ratio: report.ratio(of.error)? })
        };
        report.methods.iter().filter_map(error).collect()
    }

    /// A record that is to be written or deleted.
    pub fn take_unsaved(&self) -> Option<(String, Option<Vec<u8>>)> {
        self.unsaved.lock().pop_first()
    }
}

/// The series that an earlier controller has stored.
#[derive(Default)]
pub(super) struct Stored {
    records: Vec<SeriesRecord>,
    keys: BTreeSet<String>,
}

impl Stored {
    /// Reads them. Repeats the request until the metadata store answers.
    pub async fn read(node: &Node) -> Stored {
        let entries = metadata::entries(node.environment(), FORECAST_PREFIX).await;
        let keys = entries.iter().map(|entry| entry.key.clone()).collect();
        let record = |entry: &fulmar_meta::Entry| {
            let decoded = decode::<SeriesRecord>(&entry.key, &entry.value);
            decoded.map_err(|error| tracing::debug!(%error, "ignored a damaged record of forecasts")).ok()
        };
        Stored { records: entries.iter().filter_map(record).collect(), keys }
    }

    /// The series with steps of this length.
    fn series(self, step_s: f64) -> impl Iterator<Item = StoredSeries> {
        let is_same = move |record: &SeriesRecord| (record.step_s - step_s).abs() < 1e-9;
        self.records.into_iter().filter(is_same).flat_map(|record| record.series)
    }
}

/// A picture for the thread.
struct Work {
    picture: Arc<Picture>,
    horizon_s: f64,
}

/// The thread, and what it has published.
pub(super) struct Forecaster {
    work: SyncSender<Work>,
    pub forecasts: Arc<Forecasts>,
    step_s: f64,
}

impl Forecaster {
    /// Starts the thread. It ends when this is dropped. If it cannot be started, nothing is forecast.
    pub fn start(settings: &ControlSettings, stored: Stored, now_s: f64) -> Forecaster {
        let step_s = step_s(settings);
        let (work, waiting) = sync_channel(MAX_WAITING);
        let forecasts = Arc::<Forecasts>::default();
        let fit_time = settings.round.mul_f64(FIT_SHARE).max(MIN_FIT_TIME);
        let run = {
            let forecasts = forecasts.clone();
            move || Worker::new(step_s, stored, now_s, forecasts, fit_time).run(&waiting)
        };
        let thread = std::thread::Builder::new().name("fulmar-forecast".to_owned());
        if let Err(error) = thread.spawn(run) {
            tracing::debug!(%error, "cannot start the thread for forecasts");
        }
        Forecaster { work, forecasts, step_s }
    }

    /// Without a thread: nothing is forecast.
    #[cfg(test)]
    pub fn idle() -> Forecaster {
        Forecaster { work: sync_channel(0).0, forecasts: Arc::default(), step_s: 60.0 }
    }

    /// Passes the picture of a round to the thread, unless it is busy.
    pub fn observe(&self, picture: Arc<Picture>, horizon_s: f64) {
        let _ = self.work.try_send(Work { picture, horizon_s });
    }

    /// The newest forecast. Empty if there is none, or none that holds at this time.
    pub fn outlook(&self, at_s: f64) -> Outlook {
        let published = self.forecasts.published.read();
        let age_s = at_s - published.at_s;
        match (0.0..=MAX_AGE_STEPS * self.step_s).contains(&age_s) {
            true => published.outlook.clone(),
            false => Outlook { step_s: self.step_s, ..Outlook::default() },
        }
    }
}

/// A step is at least a round, because a round adds one value.
pub(super) fn step_s(settings: &ControlSettings) -> f64 {
    settings.step.max(settings.round).max(Duration::from_millis(1)).as_secs_f64()
}

/// What the thread has.
struct Worker {
    set: SeriesSet,
    forecasts: Arc<Forecasts>,
    changes: Arc<HashMap<String, Vec<f64>>>,
    /// The records in the metadata store.
    keys: BTreeSet<String>,
    /// Number of steps that have ended: the cluster's, and those of the others.
    ended: (u64, u64),
    fit_time: Duration,
}

impl Worker {
    fn new(step_s: f64, stored: Stored, now_s: f64, forecasts: Arc<Forecasts>, fit_time: Duration) -> Worker {
        let keys = stored.keys.clone();
        let set = SeriesSet::restored(step_s, MIN_HORIZON as usize, stored.series(step_s), now_s);
        let worker = Worker { set, forecasts, changes: Arc::default(), keys, ended: (0, 0), fit_time };
        worker.publish(true);
        worker
    }

    fn run(mut self, waiting: &Receiver<Work>) {
        // The priority is the thread's. Sessions come first.
        let _ = rustix::process::setpriority_process(None, NICENESS);
        while let Ok(work) = waiting.recv() {
            self.observe(&work);
            drop(work);
            let until = Instant::now() + self.fit_time;
            self.set.fit_due(|| Instant::now() < until);
        }
    }

    fn observe(&mut self, work: &Work) {
        let horizon = (work.horizon_s / self.set.step_s()).ceil().clamp(MIN_HORIZON, MAX_HORIZON);
        self.set.set_horizon(horizon as usize);
        let ended = self.set.observe(&work.picture);
        if ended.others {
            self.changes = Arc::new(self.set.changes());
            self.ended.1 += 1;
            if self.ended.1.is_multiple_of(SAVE_COARSE_STEPS) {
                self.save(SeriesKind::Node);
                self.save(SeriesKind::Tenant);
            }
        }
        if ended.cluster {
            self.ended.0 += 1;
            if self.ended.0.is_multiple_of(SAVE_STEPS) {
                self.save(SeriesKind::Cluster);
            }
        }
        if ended.cluster || ended.others {
            self.publish(ended.others);
        }
    }

    fn publish(&self, with_others: bool) {
        let cluster = self.set.report();
        let outlook = Outlook::from_set(&self.set, self.changes.clone());
        let others = with_others.then(|| Arc::new(self.set.reports()));
        let mut published = self.forecasts.published.write();
        published.at_s = cluster.as_ref().map_or(0.0, |report| report.at_s);
        (published.outlook, published.cluster) = (outlook, cluster);
        if let Some(others) = others {
            published.others = others;
        }
    }

    /// Queues the records of a kind, and the deletion of those that are left over.
    fn save(&mut self, kind: SeriesKind) {
        let prefix = key_prefix(kind);
        let mut unsaved = self.forecasts.unsaved.lock();
        let mut left: BTreeSet<String> =
            self.keys.iter().filter(|key| key.starts_with(&prefix)).cloned().collect();
        for (number, series) in self.set.stored(kind).chunks(MAX_RECORD_SERIES).enumerate() {
            let key = match kind {
                SeriesKind::Cluster => prefix.clone(),
                SeriesKind::Node | SeriesKind::Tenant => format!("{prefix}{number:02}"),
            };
            let Ok(value) = encode(&SeriesRecord::new(self.set.step_s(), series.to_vec())) else { continue };
            left.remove(&key);
            self.keys.insert(key.clone());
            unsaved.insert(key, Some(value));
        }
        for key in left {
            self.keys.remove(&key);
            unsaved.insert(key, None);
        }
    }
}

fn key_prefix(kind: SeriesKind) -> String {
    let name = match kind {
        SeriesKind::Cluster => "cluster",
        SeriesKind::Node => "nodes/",
        SeriesKind::Tenant => "tenants/",
    };
    format!("{FORECAST_PREFIX}{name}")
}

impl Node {
    /// The forecasts of this node, if it is the controller.
    pub(crate) fn own_forecasts(&self) -> Vec<SeriesReport> {
        self.control().forecasts().map_or_else(Vec::new, |forecasts| forecasts.reports())
    }

    /// The errors of the methods for the cluster's load, if this node is the controller.
    pub(crate) fn forecast_errors(&self) -> Vec<ForecastError> {
        self.control().forecasts().map_or_else(Vec::new, |forecasts| forecasts.errors())
    }

    /// The forecasts of the controller. None if no node controls the cluster.
    pub(crate) async fn forecasts(&self) -> Result<Vec<SeriesReport>> {
        let Some((id, incarnation)) = self.control().controller() else { return Ok(Vec::new()) };
        if id == self.id() {
            return Ok(self.own_forecasts());
        }
        let known = self.owners().node(id).filter(|known| known.alive() == Some(incarnation));
        let Some(known) = known else { return Ok(Vec::new()) };
        let request = async {
            let opening = Opening::Control { request: Request::Forecasts };
            let mut stream = self.open_stream(id, &opening).await?;
            stream.set_max_message_bytes(MAX_ANSWER_BYTES);
            let answer = stream.receive().await?.ok_or(TransportError::Protocol("no forecasts"))?;
            messages::decode::<Answer>(&answer).map_err(TransportError::Refused)
        };
        let cause = match timeout(ANSWER_TIMEOUT, request).await {
            Ok(Ok(answer)) => match answer.into_result()? {
                Answer::Forecasts { series } => return Ok(series),
                _ => "it sent another answer".to_owned(),
            },
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {ANSWER_TIMEOUT:?}"),
        };
        let message = format!("the controller \"{}\" does not answer: {cause}", known.name);
        Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, message)
            .hint("Check the nodes with \"fulmar node list\"."))
    }
}

#[cfg(test)]
mod tests {
    use fulmar_control::picture::{Node as PictureNode, Partition};

    use super::*;

    fn settings() -> ControlSettings {
        ControlSettings::default()
    }

    fn picture(minute: u32) -> Arc<Picture> {
        let partitions = vec![Partition::new("a", "n1", 0.3), Partition::new("b", "n1", 0.2)];
        let nodes = vec![PictureNode::new("n1", 1.0)];
        Arc::new(Picture { at_s: f64::from(minute) * 60.0, nodes, partitions })
    }

    fn worker(stored: Stored, now_s: f64) -> Worker {
        Worker::new(60.0, stored, now_s, Arc::default(), MIN_FIT_TIME)
    }

    fn run(worker: &mut Worker, minutes: std::ops::Range<u32>) {
        for minute in minutes {
            worker.observe(&Work { picture: picture(minute), horizon_s: 120.0 });
        }
    }

    /// Applies what is to be written to records.
    fn save(worker: &Worker, records: &mut BTreeMap<String, Vec<u8>>) {
        while let Some((key, value)) = worker.forecasts.take_unsaved() {
            match value {
                Some(value) => drop(records.insert(key, value)),
                None => drop(records.remove(&key)),
            }
        }
    }

    fn stored(records: &BTreeMap<String, Vec<u8>>) -> Stored {
        let decoded = records.iter().map(|(key, value)| decode::<SeriesRecord>(key, value).unwrap());
        Stored { records: decoded.collect(), keys: records.keys().cloned().collect() }
    }

    #[test]
    fn next_controller_begins_with_the_history() {
        let mut records = BTreeMap::new();
        let mut first = worker(Stored::default(), 0.0);
        run(&mut first, 0..121);
        save(&first, &mut records);
        let keys: Vec<&str> = records.keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            ["control/forecast/cluster", "control/forecast/nodes/00", "control/forecast/tenants/00"]
        );
        let second = worker(stored(&records), 125.0 * 60.0);
        let reports = second.forecasts.reports();
        let shown: Vec<(SeriesKind, &str, usize)> =
            reports.iter().map(|of| (of.kind, of.name.as_str(), of.loads.len())).collect();
        let expected = [
            (SeriesKind::Cluster, "", 120),
            (SeriesKind::Node, "n1", 24),
            (SeriesKind::Tenant, "a", 24),
            (SeriesKind::Tenant, "b", 24),
        ];
        assert_eq!(shown, expected);
        assert!(!second.forecasts.errors().is_empty(), "errors are kept as well");
    }

    #[test]
    fn series_with_other_steps_and_left_over_records_are_replaced() {
        let mut records = BTreeMap::new();
        let mut first = worker(Stored::default(), 0.0);
        run(&mut first, 0..121);
        save(&first, &mut records);
        records
            .insert("control/forecast/tenants/07".to_owned(), records["control/forecast/tenants/00"].clone());
        let mut next = worker(stored(&records), 125.0 * 60.0);
        run(&mut next, 125..200);
        save(&next, &mut records);
        assert!(!records.contains_key("control/forecast/tenants/07"), "{:?}", records.keys());
        let other = stored(&records).series(1.0).count();
        assert_eq!(other, 0, "a series with another step cannot be continued");
    }

    #[test]
    fn outlook_is_used_while_it_holds() {
        let mut worker = worker(Stored::default(), 0.0);
        run(&mut worker, 0..31);
        let forecaster = Forecaster { forecasts: worker.forecasts.clone(), ..Forecaster::idle() };
        let outlook = forecaster.outlook(30.0 * 60.0);
        assert_eq!((outlook.loads.len(), outlook.step_s), (15, 60.0));
        assert!(outlook.changes.contains_key("a"));
        assert!(forecaster.outlook(36.0 * 60.0).loads.is_empty(), "its newest value is old");
        assert!(forecaster.outlook(29.0 * 60.0).loads.is_empty(), "it is of another clock");
    }

    #[test]
    fn thread_publishes_without_delaying_rounds() {
        let forecaster = Forecaster::start(&settings(), Stored::default(), 0.0);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut minute = 0;
        while forecaster.forecasts.reports().is_empty() {
            minute += 1;
            forecaster.observe(picture(minute), 120.0);
            assert!(Instant::now() < deadline, "nothing was published");
            std::thread::yield_now();
        }
        assert!(forecaster.forecasts.reports()[0].loads[0] > 0.49);
    }
}
