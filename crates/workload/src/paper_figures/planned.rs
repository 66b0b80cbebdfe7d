//! Figures that need no server: E-Store's workloads, planners of `fulmar-control`, and its model of
//! nodes ([`Reconfiguration`]).
//!
//! ```text
//!  0 s       30 s                40 s                          200 s
//!  |  skew   |  keys are counted |  planner | sub-plans | after |
//! ```

use std::time::Instant;

use anyhow::Context;
use fulmar_control::picture::Picture;
use fulmar_control::planners::{Resize, Settings, cases, plan, planner, resize};
use fulmar_control::simulator::{Reconfiguration, Second, monitored};
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use super::{Bench, Course, Experiment, FigureRow, Measure, measure};

/// Keys whose accesses are counted: 1 % of the tuples in the paper.
const HOT_KEYS: u32 = 1000;
/// When counting begins, how long it takes, and the end (figure 9).
const START_S: f64 = 30.0;
const WINDOW_S: f64 = 10.0;
const SECONDS: u32 = 200;
/// Seconds between two rows of a figure over time.
const STEP: usize = 5;

pub(super) const ALL: &[&str] =
    &["greedy", "greedy-extended", "first-fit", "one-tier", "two-tier", "local-search"];
pub(super) const APPROXIMATE: &[&str] = &["greedy", "greedy-extended", "first-fit", "local-search"];
pub(super) const SKEWS: &[&str] = &["low", "high"];

/// What clients get.
pub(super) const OVER_TIME: [Measure; 3] = [
    measure("throughput_percent", "Throughput", "% of the offered load"),
    measure("mean_ms", "Mean latency", "ms"),
    measure("moved_percent", "Moves that have ended", "%"),
];
/// From the start of counting to the end, over that before.
pub(super) const IMPROVEMENT: [Measure; 2] = [
    measure("throughput_ratio", "Throughput after over before", "times"),
    measure("latency_ratio", "Latency before over after", "times"),
];
/// Of the plan itself.
pub(super) const PLANNING: [Measure; 5] = [
    measure("planning_ms", "Duration of the planner", "ms"),
    measure("gap_percent", "Highest load above the bound", "%"),
    measure("moves", "Moves", ""),
    measure("moved_mb", "Bytes moved", "MB"),
    measure("moving_s", "Duration of the moves one by one at each node", "s"),
];

/// Plans for a workload of E-Store.
pub(super) struct Planned {
    /// As in [`cases::estore_case`].
    pub(super) workload: &'static str,
    pub(super) skews: &'static [&'static str],
    pub(super) planners: &'static [&'static str],
    /// The load, in multiples of 80 % of the nodes' capacity.
    pub(super) load: f64,
    /// Nodes that are added or removed by the plan.
    pub(super) resize: Option<Resize>,
    pub(super) view: View,
}

/// What the rows of a figure are.
pub(super) enum View {
    /// [`OVER_TIME`].
    Time,
    /// [`IMPROVEMENT`]; the number of the skew is the x axis.
    Average,
    /// [`IMPROVEMENT`] with windows of these lengths.
    Windows(&'static [f64]),
    /// [`IMPROVEMENT`] with these shares of the tuples counted, in percent.
    Top(&'static [f64]),
    /// [`PLANNING`]; the number of the skew is the x axis.
    Plan,
}

impl Planned {
    pub(super) const DEFAULT: Planned = Planned {
        workload: "ycsb",
        skews: SKEWS,
        planners: APPROXIMATE,
        load: 1.0,
        resize: None,
        view: View::Time,
    };

    fn picture(&self, skew: &str, hot_keys: u32) -> anyhow::Result<Picture> {
        let name = format!("{}-{skew}", self.workload);
        let picture = cases::estore_case(&name, hot_keys).with_context(|| format!("there is no {name}"))?;
        let mut picture = scaled(picture, self.load);
        if let Some(change) = self.resize {
            picture = resize(&picture, change);
        }
        Ok(picture)
    }

    /// Plans with what counting has shown, and returns what came of it.
    fn one(&self, skew: &str, name: &str, counted: Counted, time_limit_s: f64) -> anyhow::Result<Planning> {
        // The keys that may be counted are twice as many, because a short window finds wrong ones.
        let picture = self.picture(skew, counted.keys * 2)?;
        let (truth, seen) = monitored(&picture, counted.window_s, counted.keys as usize);
        let planner = planner(name).with_context(|| format!("there is no planner {name}"))?;
        let settings = Settings { time_limit_s, ..Settings::default() };
        let begun = Instant::now();
        let plan = plan(&seen, planner, &settings);
        let planning_s = begun.elapsed().as_secs_f64();
        let run = Reconfiguration {
            picture: &truth,
            plan: &plan,
            cost: settings.cost,
            start_s: START_S,
            window_s: counted.window_s,
            // An integer program that ends at its limit is not part of the time, as in the paper.
            planning_s: planning_s.min(1.0),
        };
        let seconds = run.run(SECONDS);
        let evaluation = plan.evaluation;
        let values = vec![
            planning_s * 1e3,
            evaluation.gap_percent,
            evaluation.moves as f64,
            evaluation.bytes as f64 / 1e6,
            evaluation.seconds,
        ];
        Ok(Planning { seconds, values, notes: plan.notes })
    }

    fn course(&self, bench: &Bench<'_>) -> anyhow::Result<Course> {
        let mut course = Course::default();
        for (number, skew) in (1..).zip(self.skews) {
            for name in self.planners {
                let time = || format!("{name}, {skew} skew");
                let line = match self.view {
                    View::Time | View::Windows(_) | View::Top(_) => time(),
                    View::Average | View::Plan => (*name).to_owned(),
                };
                if !bench.arguments.wants(&line) {
                    continue;
                }
                bench.step(&time());
                let plan = |counted| self.one(skew, name, counted, bench.arguments.time().as_secs_f64());
                let row = |x, values| FigureRow { line: line.clone(), x, values: Ok(values) };
                let usual = Counted { window_s: WINDOW_S, keys: HOT_KEYS };
                match self.view {
                    View::Time => {
                        let planned = plan(usual)?;
                        course.rows.extend(planned.over_time().map(|(x, values)| row(x, values)));
                        course.notes.extend(planned.notes.iter().map(|note| format!("{line}: {note}")));
                    }
                    View::Average => course.rows.push(row(f64::from(number), plan(usual)?.improvement())),
                    View::Plan => course.rows.push(row(f64::from(number), plan(usual)?.values)),
                    View::Windows(lengths) => {
                        for window_s in lengths {
                            let counted = Counted { window_s: *window_s, ..usual };
                            course.rows.push(row(*window_s, plan(counted)?.improvement()));
                        }
                    }
                    View::Top(shares) => {
                        for percent in shares {
                            let keys = (f64::from(HOT_KEYS) * percent).round() as u32;
                            course.rows.push(row(*percent, plan(Counted { keys, ..usual })?.improvement()));
                        }
                    }
                }
            }
        }
        Ok(course)
    }
}

impl Experiment for Planned {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move { self.course(bench) }.boxed_local()
    }

    fn is_computed(&self) -> bool {
        true
    }
}

/// How keys are counted.
#[derive(Clone, Copy)]
struct Counted {
    window_s: f64,
    keys: u32,
}

/// A plan, and what clients get while it is carried out.
struct Planning {
    seconds: Vec<Second>,
    /// Of [`PLANNING`].
    values: Vec<f64>,
    notes: Vec<String>,
}

impl Planning {
    fn over_time(&self) -> impl Iterator<Item = (f64, Vec<f64>)> {
        let values = |(second, at): (usize, &Second)| {
            (second as f64, vec![at.throughput * 100.0, at.latency_ms, at.moved * 100.0])
        };
        self.seconds.iter().enumerate().step_by(STEP).map(values)
    }

    /// The mean from the start of counting, over that before.
    fn improvement(&self) -> Vec<f64> {
        let mean = |seconds: &[Second], value: fn(&Second) -> f64| {
            seconds.iter().map(value).sum::<f64>() / seconds.len().max(1) as f64
        };
        let (before, after) = self.seconds.split_at(START_S as usize);
        let ratio = |value: fn(&Second) -> f64| mean(after, value) / mean(before, value);
        vec![ratio(|second| second.throughput), 1.0 / ratio(|second| second.latency_ms)]
    }
}

/// A picture with all loads multiplied.
fn scaled(mut picture: Picture, factor: f64) -> Picture {
    for partition in &mut picture.partitions {
        partition.load *= factor;
        let pieces = partition.hot_keys.iter_mut().chain(&mut partition.blocks);
        pieces.for_each(|piece| piece.load *= factor);
    }
    picture
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Counted = Counted { window_s: WINDOW_S, keys: HOT_KEYS };

    #[test]
    fn a_skewed_load_gets_a_multiple_of_its_throughput() {
        let planning = Planned::DEFAULT.one("high", "greedy-extended", USUAL, 1.0).unwrap();
        let [throughput, latency] = planning.improvement()[..] else { panic!("two ratios") };
        assert!(throughput > 2.0 && latency > 2.0, "{throughput} {latency}");
        assert_eq!(planning.over_time().count(), SECONDS as usize / STEP);
    }

    #[test]
    fn nodes_are_added_to_an_overloaded_cluster() {
        let out = Planned { load: 1.35, resize: Some(Resize::Add(1)), ..Planned::DEFAULT };
        let last = |planned: &Planned| {
            let planning = planned.one("low", "greedy-extended", USUAL, 1.0).unwrap();
            planning.seconds.last().unwrap().throughput
        };
        assert!(last(&out) > 0.99, "six nodes serve it");
        assert!(last(&Planned { resize: None, ..out }) < 0.99, "five nodes do not");
    }
}
