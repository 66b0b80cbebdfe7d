//! Progress output of the demo: a status line that is refreshed, and permanent lines.
//!
//! On a terminal the status line is redrawn every 200 ms. Elsewhere (a log file, CI) it is printed
//! every 5 s. Permanent lines go to stdout, the status line to stderr.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fulmar_workload::run::RunTick;
use indicatif::{ProgressBar, ProgressStyle};

use super::pgbench::Progress;

/// Interval of the status line on a terminal.
const REFRESH_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the status line elsewhere.
const PRINT_INTERVAL: Duration = Duration::from_secs(5);

/// The latest statistics of each load, updated by its task.
#[derive(Default)]
pub struct DemoStatistics {
    statistics: Mutex<Statistics>,
}

#[derive(Default)]
struct Statistics {
    shops: Option<RunTick>,
    banks: BTreeMap<String, Progress>,
    ledger_rows: u64,
}

impl DemoStatistics {
    /// Sets the shops' statistics of the last second.
    pub fn shops(&self, tick: &RunTick) {
        self.lock().shops = Some(tick.clone());
    }

    /// Sets a bank's statistics of the last second.
    pub fn bank(&self, name: &str, progress: Progress) {
        self.lock().banks.insert(name.to_owned(), progress);
    }

    /// Removes a bank's statistics when its pgbench has ended.
    pub fn bank_finished(&self, name: &str) {
        self.lock().banks.remove(name);
    }

    /// Sets the ledger's number of acknowledged rows.
    pub fn ledger(&self, rows: u64) {
        self.lock().ledger_rows = rows;
    }

    fn lock(&self) -> MutexGuard<'_, Statistics> {
        // No holder of the lock can panic in the middle of a change.
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Formats throughput, latency and the ledger's rows, short enough for a terminal of 80
    /// columns.
    fn line(&self) -> String {
        let statistics = self.lock();
        let shops = match &statistics.shops {
            Some(tick) => {
                format!("{:.0}/s p50 {:.1} p99 {:.1} ms", tick.throughput_tps, tick.p50_ms, tick.p99_ms)
            }
            None => "-".to_owned(),
        };
        let tps: f64 = statistics.banks.values().map(|bank| bank.tps).sum();
        // The average over all transactions, not over banks.
        let latency_sum: f64 = statistics.banks.values().map(|bank| bank.tps * bank.latency_ms).sum();
        let banks =
            if tps > 0.0 { format!("{tps:.0}/s {:.1} ms", latency_sum / tps) } else { "-".to_owned() };
        format!("shops {shops} | banks {banks} | ledger {}", statistics.ledger_rows)
    }
}

/// The demo's output.
pub struct Screen {
    bar: ProgressBar,
    is_terminal: bool,
}

impl Screen {
    /// Starts the status line.
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {elapsed:>3} {wide_msg}");
        let bar = ProgressBar::new_spinner();
        // The template is a constant. An invalid one falls back to indicatif's default style.
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(REFRESH_INTERVAL);
        Self { bar, is_terminal: std::io::stderr().is_terminal() }
    }

    /// Shows an activity without statistics.
    pub fn busy(&self, activity: &'static str) {
        self.bar.set_message(activity);
        if !self.is_terminal {
            eprintln!("{activity} ...");
        }
    }

    /// Prints a permanent line.
    pub fn note(&self, text: &str) {
        self.bar.suspend(|| println!("{text}"));
    }

    /// Shows the statistics until `work` ends.
    pub async fn show_while<T>(&self, live: &DemoStatistics, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        let mut refresh = tokio::time::interval(REFRESH_INTERVAL);
        let mut printed = Instant::now();
        loop {
            tokio::select! {
                result = &mut work => return result,
                _ = refresh.tick() => {
                    let line = live.line();
                    if !self.is_terminal && printed.elapsed() >= PRINT_INTERVAL {
                        printed = Instant::now();
                        eprintln!("{line}");
                    }
                    self.bar.set_message(line);
                }
            }
        }
    }

    /// Removes the status line.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_line_adds_up_banks_and_weights_their_latency() {
        let live = DemoStatistics::default();
        assert_eq!(live.line(), "shops - | banks - | ledger 0");
        live.bank("a", Progress { tps: 300.0, latency_ms: 2.0 });
        live.bank("b", Progress { tps: 100.0, latency_ms: 6.0 });
        live.bank("b", Progress { tps: 100.0, latency_ms: 4.0 });
        live.ledger(7);
        assert_eq!(live.line(), "shops - | banks 400/s 2.5 ms | ledger 7");
        live.bank_finished("a");
        live.bank_finished("b");
        assert_eq!(live.line(), "shops - | banks - | ledger 7");
    }
}
