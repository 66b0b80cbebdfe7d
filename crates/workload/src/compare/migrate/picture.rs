//! `bench migrate --mechanism all`: the table and the picture of the laboratory.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use super::laboratory::{Interval, MECHANISMS, Observed, Trial, TrialLoad};
use super::{LaboratoryLoad, MigrateArgs, Net};
use crate::compare::rounds::Progress;
use crate::report::chart::{Chart, Scale, Series, escape};
use crate::report::page::frame;
use crate::server::run_in_private;
use crate::tpcc::Tpcc;
use crate::ycsb::Ycsb;

const CONNECTIONS: usize = 8;
/// The size of a warehouse of TPC-C in MiB.
const WAREHOUSE_MIB: u64 = 90;
const COLUMNS: [&str; 10] = [
    "mechanism",
    "failed",
    "aborted",
    "pause, ms",
    "freeze, ms",
    "moved, MB",
    "duration, ms",
    "before, ms",
    "during, ms",
    "after, ms",
];

/// Runs the laboratory, prints a table and writes the page. Fails if a mechanism could not be
/// measured.
pub(super) async fn measure(arguments: &MigrateArgs, binary: &Path) -> anyhow::Result<()> {
    if arguments.net == Net::Wan {
        let own: Vec<String> = std::env::args().skip(1).collect();
        if let Some(status) = run_in_private(&own)? {
            std::process::exit(status.code().unwrap_or(1));
        }
    }
    let progress = Progress::new();
    let (mut observed, mut failures) = (Vec::new(), Vec::new());
    for mechanism in MECHANISMS {
        progress.step(&format!("moving by {mechanism}"));
        match trial(arguments, mechanism).observe(binary).await {
            Ok(result) => observed.push(result),
            Err(error) => failures.push(format!("{mechanism}: {error:#}")),
        }
    }
    drop(progress);
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&observed)?),
        false => println!("{}", table(&observed)),
    }
    let file = &arguments.output;
    std::fs::write(file, page(arguments, &observed, &failures))
        .with_context(|| format!("could not write {}", file.display()))?;
    eprintln!("The picture is in {}", file.display());
    anyhow::ensure!(failures.is_empty(), "could not be measured: {}", failures.join("; "));
    Ok(())
}

fn trial(arguments: &MigrateArgs, mechanism: &'static str) -> Trial {
    let load = match arguments.workload {
        LaboratoryLoad::Ycsb => TrialLoad::Ycsb(Ycsb::default().of_bytes(arguments.size_mib << 20)),
        LaboratoryLoad::Tpcc => {
            // A tenant smaller than a warehouse has fewer items and customers.
            let part = (arguments.size_mib as f64 / WAREHOUSE_MIB as f64).min(1.0);
            let rows = |of: f64| (of * part).max(100.0) as u32;
            TrialLoad::Tpcc(Tpcc {
                warehouses: ((arguments.size_mib / WAREHOUSE_MIB) as u32).max(1),
                items: rows(100_000.0),
                customers: rows(3_000.0),
                ..Tpcc::default()
            })
        }
    };
    let window = Duration::from_secs(arguments.window);
    Trial {
        mechanism,
        load,
        rate_tps: Some(arguments.rate),
        connections: CONNECTIONS,
        memory_bytes: arguments.memory_mib << 20,
        others: 0,
        is_wide: arguments.net == Net::Wan,
        before: window,
        after: window * 2,
    }
}

fn cells(of: &Observed) -> [String; COLUMNS.len()] {
    let values = [of.pause_ms, of.freeze_ms, of.bytes / 1e6, of.duration_ms];
    let latencies = [of.before_ms, of.during_ms, of.after_ms];
    let counts = [of.mechanism.to_owned(), of.failed.to_string(), of.aborted.to_string()];
    let values = values.into_iter().map(|value| format!("{value:.0}"));
    let latencies = latencies.into_iter().map(|value| format!("{value:.1}"));
    let mut all = counts.into_iter().chain(values).chain(latencies);
    std::array::from_fn(|_| all.next().unwrap_or_default())
}

fn table(observed: &[Observed]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(COLUMNS);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.add_rows(observed.iter().map(cells));
    table
}

/// All mechanisms in one picture. The moves begin at the same place.
fn page(arguments: &MigrateArgs, observed: &[Observed], failures: &[String]) -> String {
    let net = match arguments.net {
        Net::Lan => "The nodes are on one machine.".to_owned(),
        Net::Wan => {
            let wan = crate::server::Wan::coasts(0);
            format!(
                "The destination is at another site: {} ms each way, {} MB/s per connection between nodes, three \
                 quarters of it for copies. Clients stay at the first site.",
                wan.delay.as_millis(),
                wan.bytes_per_s / 1_000_000
            )
        }
    };
    let mut body = format!(
        "<p>A tenant of {} MiB with {} transactions/s ({}) is moved once by each mechanism. Nodes have {} \
         MiB of memory. {net} The time from the begin to the end of a move is marked. Aborted attempts \
         were repeated by the clients.</p>\n",
        arguments.size_mib, arguments.rate, arguments.workload, arguments.memory_mib
    );
    let chart = |title, unit, value: fn(&Interval) -> f64| {
        let series = observed.iter().map(|of| {
            let points = of.intervals.iter().map(|at| (at.at_s, value(at))).collect();
            Series { spans: vec![of.span], ..Series::new(of.mechanism, points) }
        });
        let (x, y) = (("time, s", Scale::Linear), (unit, Scale::Linear));
        Chart { title, x, y, series: series.collect(), measured_from: None }.svg()
    };
    body.push_str(&chart("Mean latency from the scheduled start", "ms", |at| at.mean_ms));
    body.push_str(&chart("Longest latency", "ms", |at| at.longest_ms));
    body.push_str(&chart("Throughput", "transactions/s", |at| at.throughput_tps));
    for failure in failures {
        body.push_str(&format!("<p class=\"warning\">{}</p>\n", escape(failure)));
    }
    let row = |tag: &str, cells: &[String]| {
        let cells = cells.iter().map(|cell| format!("<{tag} class=\"n\">{}</{tag}>", escape(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    body.push_str(&format!("<table>\n{}", row("th", &COLUMNS.map(str::to_owned))));
    observed.iter().for_each(|of| body.push_str(&row("td", &cells(of))));
    frame("Moves of a loaded tenant", &(body + "</table>\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        migrate: MigrateArgs,
    }

    fn arguments(words: &[&str]) -> MigrateArgs {
        Line::try_parse_from(["migrate"].iter().chain(words)).map(|line| line.migrate).unwrap()
    }

    fn observed(mechanism: &'static str) -> Observed {
        let interval = |second: u32| Interval {
            at_s: f64::from(second),
            throughput_tps: 50.0,
            mean_ms: 2.0,
            longest_ms: if second == 3 { 900.0 } else { 5.0 },
        };
        Observed {
            mechanism,
            failed: 0,
            aborted: 3,
            pause_ms: 895.0,
            freeze_ms: 700.0,
            bytes: 12e6,
            duration_ms: 1234.0,
            before_ms: 2.0,
            during_ms: 30.0,
            after_ms: 2.5,
            span: (2.0, 3.0),
            intervals: (0..6).map(interval).collect(),
            latencies: Vec::new(),
            outward: None,
        }
    }

    #[test]
    fn one_picture_has_all_mechanisms_with_their_moves() {
        let arguments = arguments(&["--mechanism", "all", "--net", "wan"]);
        let page = page(&arguments, &[observed("stop"), observed("live")], &["sql: <unknown>".to_owned()]);
        assert_eq!(page.matches("class=\"span\"").count(), 6, "each move is marked in three charts");
        for text in ["stop", "live", "sql: &lt;unknown&gt;", "1234", "895", "another site: 40 ms"] {
            assert!(page.contains(text), "{text}");
        }
        let table = table(&[observed("stop")]).to_string();
        assert!(table.contains("aborted") && table.contains("30.0"), "{table}");
        assert!((observed("stop").increase_percent() - 25.0).abs() < 1e-9);
    }

    #[test]
    fn tpcc_of_any_size_has_at_least_a_part_of_a_warehouse() {
        let load = |mib| {
            let arguments = arguments(&["--mechanism", "all", "--workload", "tpcc", "--size-mib", mib]);
            match trial(&arguments, "live").load {
                TrialLoad::Tpcc(load) => (load.warehouses, load.items),
                TrialLoad::Ycsb(_) => panic!("not TPC-C"),
            }
        };
        assert_eq!([load("45"), load("180")], [(1, 50_000), (2, 100_000)]);
    }
}
