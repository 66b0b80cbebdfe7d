//! The stages of a run, from loading to the report.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use futures::future::{OptionFuture, try_join_all};
use tokio::sync::Barrier;

use super::collector::Collector;
use super::driver::{Outcome, Plan, drive};
use super::record::{Record, RunRecord, TenantRecord};
use super::report::{Report, ReportInput};
use super::{Machine, Processes, RunOptions, database, remote, sampler};
use crate::arrival::Arrival;
use crate::driver::run_on_driver_thread;
use crate::keys::Distribution;
use crate::measure::Meter;
use crate::workload::Workload;

pub(super) async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<Report> {
    let targets = options.targets();
    let first_target = targets.first().context("at least one database is required")?;
    let server = database::server(first_target).await?;
    let sampling = !options.server_processes.is_empty();
    let pieces = options.all_threads() + usize::from(sampling);
    let waiting = options.drivers() + usize::from(sampling);
    let first = first_record(&workload, &options, server.version)?;
    let plan = Arc::new(Plan {
        workloads: workloads(&workload, &options),
        rate_shares: options.tenant_rates.shares(options.targets().len()),
        dialect: server.dialect,
        collector: Collector::new(&options, workload.kinds(), pieces)?,
        ready: Barrier::new(waiting),
        start: Barrier::new(waiting),
        clock: OnceLock::new(),
        options,
    });
    run_on_new_thread(&plan, |plan| async move {
        database::load(&plan.workloads, &plan.options, plan.dialect).await
    })
    .await?;
    plan.collector.write(&Record::Run(RunRecord { started_unix_s: unix_seconds(), ..first }));

    let drivers = (0..plan.options.drivers()).map(|driver| {
        run_on_new_thread(&plan, move |plan| async move {
            match plan.options.processes {
                Processes::Parent { .. } => remote::drive(plan, driver).await,
                _ => drive(plan, driver).await,
            }
        })
    });
    let drivers = try_join_all(drivers);
    let sampler = OptionFuture::from(sampling.then(|| run_on_new_thread(&plan, sampler::sample)));
    let sampler = async { sampler.await.transpose() };
    let (outcomes, usage) = tokio::try_join!(drivers, sampler)?;
    let usage = usage.flatten();
    run_on_new_thread(&plan, |plan| async move { database::check(&plan.workloads, &plan.options).await })
        .await?;

    let driver_cpu: Vec<_> = outcomes.iter().flat_map(|outcome| outcome.cpu.iter().copied()).collect();
    let meter = merge_outcomes(outcomes)?;
    let offered_tps = offered(&plan.options);
    let tenants = tenants(&plan, &meter, offered_tps);
    let report = Report::new(ReportInput {
        workload: W::NAME,
        workload_options: serde_json::to_value(&workload)?,
        kinds: &workload.kinds(),
        options: &plan.options,
        meter: &meter,
        tenants: &tenants,
        offered_tps,
        driver_cpu: &driver_cpu,
        usage,
    });
    tenants.into_iter().for_each(|tenant| plan.collector.write(&Record::Tenant(tenant)));
    plan.collector.write(&Record::Report(Box::new(report.clone())));
    plan.collector.finish()?;
    Ok(report)
}

/// Runs `work` on a new thread.
pub(super) async fn run_on_new_thread<W, T, F, R>(plan: &Arc<Plan<W>>, work: F) -> anyhow::Result<T>
where
    W: Workload,
    T: Send + 'static,
    F: FnOnce(Arc<Plan<W>>) -> R + Send + 'static,
    R: Future<Output = anyhow::Result<T>> + 'static,
{
    let plan = plan.clone();
    run_on_driver_thread(move || work(plan)).await
}

/// Returns the workload of each tenant: all equal, or of different sizes with the same total amount
/// of data.
pub(super) fn workloads<W: Workload>(workload: &W, options: &RunOptions) -> Vec<W> {
    let tenants = options.targets().len();
    match options.tenant_sizes {
        Distribution::Uniform => vec![workload.clone(); tenants],
        sizes => sizes.shares(tenants).iter().map(|share| workload.scaled(share * tenants as f64)).collect(),
    }
}

/// The mean number of transactions per second that are due in the window.
fn offered(options: &RunOptions) -> Option<f64> {
    let Arrival::Open { rate_tps, shape, .. } = &options.arrival else { return None };
    let (opens, seconds) = (options.warm_up.as_secs_f64(), options.measure.as_secs_f64());
    Some(rate_tps * shape.trace(opens + seconds).mean(opens, opens + seconds))
}

pub(super) fn merge_outcomes(outcomes: Vec<Outcome>) -> anyhow::Result<Meter> {
    let mut meters = outcomes.into_iter().map(|outcome| outcome.meter);
    let mut all = meters.next().context("at least one driver thread is required")?;
    meters.for_each(|meter| all.add(meter.counted()));
    Ok(all)
}

fn tenants<W: Workload>(plan: &Plan<W>, meter: &Meter, offered_tps: Option<f64>) -> Vec<TenantRecord> {
    let names = plan.options.targets().into_iter().map(|target| target.database);
    let each = names.zip(&meter.tenants).zip(&plan.rate_shares);
    each.filter_map(|((tenant, availability), share)| {
        let availability = availability.as_ref()?;
        let offered = offered_tps.map(|offered| offered * share).filter(|offered| *offered > 0.0);
        Some(TenantRecord {
            tenant,
            transactions: availability.slots(1).sum(),
            mean_ms: availability.mean_ms(),
            cancelled: availability.cancelled,
            lost_work_s: offered.map(|offered| availability.cancelled as f64 / offered),
            down_intervals: availability.down_intervals(plan.options.down_interval_seconds),
            outages_s: availability.outages().map(|outage| outage.as_secs_f64()).collect(),
        })
    })
    .collect()
}

fn first_record<W: Workload>(
    workload: &W,
    options: &RunOptions,
    server: String,
) -> anyhow::Result<RunRecord> {
    Ok(RunRecord {
        workload: W::NAME.to_owned(),
        options: serde_json::to_value(workload)?,
        arrival: options.arrival.to_string(),
        target: options.target.to_string(),
        server,
        seed: options.seed,
        build: options.build.to_owned(),
        machine: Machine::this(),
        started_unix_s: unix_seconds(),
        warm_up_s: options.warm_up.as_secs_f64(),
        window_s: options.measure.as_secs_f64(),
        interval_s: options.tick.as_secs_f64(),
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
