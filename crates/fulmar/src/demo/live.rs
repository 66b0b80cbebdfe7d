//! What happens now, on one line that refreshes itself; what has happened, on lines that stay.
//!
//! On a terminal the line is redrawn five times a second. Elsewhere (a log file, CI) it is printed every few
//! seconds. The lines that stay go to stdout, the live line to stderr.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fulmar_workload::run::RunTick;
use indicatif::{ProgressBar, ProgressStyle};

use super::pgbench::Progress;

const REFRESH: Duration = Duration::from_millis(200);
const PRINT_EVERY: Duration = Duration::from_secs(5);

/// The latest figures of every load, written by those who run it.
#[derive(Default)]
pub struct Live {
    figures: Mutex<Figures>,
}

#[derive(Default)]
struct Figures {
    shops: Option<RunTick>,
    banks: BTreeMap<String, Progress>,
    ledger_rows: u64,
}

impl Live {
    /// The shops' last second.
    pub fn shops(&self, tick: &RunTick) {
        self.figures().shops = Some(tick.clone());
    }

    /// A bank's last second.
    pub fn bank(&self, name: &str, progress: Progress) {
        self.figures().banks.insert(name.to_owned(), progress);
    }

    /// A bank's pgbench has ended.
    pub fn bank_rests(&self, name: &str) {
        self.figures().banks.remove(name);
    }

    /// Rows that were acknowledged to the ledger's client.
    pub fn ledger(&self, rows: u64) {
        self.figures().ledger_rows = rows;
    }

    fn figures(&self) -> MutexGuard<'_, Figures> {
        // Nothing that holds it can panic half way through a change.
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Transactions per second with their latency, and the ledger's rows; short, for a terminal of 80 columns.
    fn line(&self) -> String {
        let figures = self.figures();
        let shops = match &figures.shops {
            Some(tick) => {
                format!("{:.0}/s p50 {:.1} p99 {:.1} ms", tick.throughput_tps, tick.p50_ms, tick.p99_ms)
            }
            None => "-".to_owned(),
        };
        let tps: f64 = figures.banks.values().map(|bank| bank.tps).sum();
        // Weighted: a slow second with few transactions is seen by few.
        let waits: f64 = figures.banks.values().map(|bank| bank.tps * bank.latency_ms).sum();
        let banks = if tps > 0.0 { format!("{tps:.0}/s {:.1} ms", waits / tps) } else { "-".to_owned() };
        format!("shops {shops} | banks {banks} | ledger {}", figures.ledger_rows)
    }
}

/// The terminal.
pub struct Screen {
    bar: ProgressBar,
    is_terminal: bool,
}

impl Screen {
    /// A line under whatever was printed.
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {elapsed:>3} {wide_msg}");
        let bar = ProgressBar::new_spinner();
        // The template is a constant; if it were wrong, indicatif's own style would do.
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(REFRESH);
        Self { bar, is_terminal: std::io::stderr().is_terminal() }
    }

    /// What is being done, while there are no figures.
    pub fn busy(&self, what: &'static str) {
        self.bar.set_message(what);
        if !self.is_terminal {
            eprintln!("{what} ...");
        }
    }

    /// A line that stays.
    pub fn note(&self, text: &str) {
        self.bar.suspend(|| println!("{text}"));
    }

    /// Shows the figures until `work` ends.
    pub async fn show_while<T>(&self, live: &Live, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        let mut refresh = tokio::time::interval(REFRESH);
        let mut printed = Instant::now();
        loop {
            tokio::select! {
                result = &mut work => return result,
                _ = refresh.tick() => {
                    let line = live.line();
                    if !self.is_terminal && printed.elapsed() >= PRINT_EVERY {
                        printed = Instant::now();
                        eprintln!("{line}");
                    }
                    self.bar.set_message(line);
                }
            }
        }
    }

    /// Takes the line away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_sums_banks_and_weighs_their_latency() {
        let live = Live::default();
        assert_eq!(live.line(), "shops - | banks - | ledger 0");
        live.bank("a", Progress { tps: 300.0, latency_ms: 2.0 });
        live.bank("b", Progress { tps: 100.0, latency_ms: 6.0 });
        live.bank("b", Progress { tps: 100.0, latency_ms: 4.0 });
        live.ledger(7);
        assert_eq!(live.line(), "shops - | banks 400/s 2.5 ms | ledger 7");
        live.bank_rests("a");
        live.bank_rests("b");
        assert_eq!(live.line(), "shops - | banks - | ledger 7");
    }
}
