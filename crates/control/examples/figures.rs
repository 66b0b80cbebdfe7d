//! Prints the figures of the planners: E-Store's nine cases, and the large case.
//!
//! `cargo run --release -p fulmar-control --example figures`

use std::time::Instant;

use fulmar_control::planners::{PLANNERS, Settings, cases, plan};

fn main() {
    let settings = Settings { time_limit_s: 5.0, ..Settings::default() };
    let mut pictures = cases::estore();
    pictures.push(("large".to_owned(), cases::large(100, 1000, 10_000)));
    for (name, picture) in pictures {
        for planner in PLANNERS {
            let start = Instant::now();
            let plan = plan(&picture, planner, &settings);
            let evaluation = plan.evaluation;
            println!(
                "{name:11} {:16} {:8.1} ms  gap {:6.1} %  {:6} moves  {:8.1} MB  {:7.1} s",
                plan.planner,
                start.elapsed().as_secs_f64() * 1e3,
                evaluation.gap_percent,
                evaluation.moves,
                evaluation.bytes as f64 / 1e6,
                evaluation.seconds,
            );
        }
    }
}
