//! Tests of the comparison at small sizes, with PostgreSQL on both sides, so that they do not need
//! Fulmar.

use super::*;

/// Lengths of measurements. The longer ones are used if a busy machine completes no transaction.
const SECONDS: [u64; 3] = [1, 5, 25];

/// Measures cases with PostgreSQL on both sides.
async fn measured(peer: Peer, rounds: u32, names: &[&str]) -> Vec<CaseResult> {
    let wanted: Vec<_> = names.iter().map(|name| cases::case(name)).collect();
    let mut results = Vec::new();
    for seconds in SECONDS {
        results = measure(&bench(peer, rounds, seconds), &wanted).await;
        if !results.iter().any(is_empty) {
            break;
        }
    }
    results
}

/// Returns true if no transaction was completed in one of the measurements.
fn is_empty(result: &CaseResult) -> bool {
    match &result.outcome {
        Outcome::Ratio { fulmar, of_peer, .. } => fulmar.min <= 0.0 || of_peer.min <= 0.0,
        // The memory of idle tenants may be below the precision.
        Outcome::Value { value } => value.min <= 0.0 && result.name != "idle-tenant-kib",
        Outcome::Failed { reason } => reason.contains("no transaction committed"),
    }
}

fn bench(peer: Peer, rounds: u32, seconds: u64) -> Bench {
    let options = CompareOptions {
        suite: Suite::Node,
        case: Vec::new(),
        seconds,
        rounds,
        memory_bytes: 64 << 20,
        json: false,
        fulmar_binary: PathBuf::new(),
        before: None,
    };
    let sizes = Sizes {
        read_scale: 1,
        ycsb_records: 200,
        tenants: 5,
        tenant_records: 10,
        idle_tenants: 3,
        copy_rows: 500,
        idle_connections: 20,
        small_tenants: 4,
        small_tenant_records: 50,
        tpcc: (2, 100, 30),
        // A run this short on a busy machine may not reach any rate.
        min_tenants_rate_share: 0.0,
        min_big_rate_share: 0.0,
        warm_up: Duration::from_millis(200),
        settle_time: Duration::from_millis(200),
    };
    let postgres: MakeProduct = Arc::new(|| Ok(Box::new(Postgres::installed()?) as _));
    Bench::new(&options, sizes, postgres.clone(), peer, postgres)
}

/// Every case yields a ratio, with the same number of rounds on both sides.
#[tokio::test]
async fn both_servers_are_measured_in_every_round() {
    let names = [
        "cpu-read-8",
        "ycsb-8",
        "tpcb-8",
        "tenants-500-cpu",
        "tenants-500-memory",
        "copy-in",
        "tpcc-16",
        "tpcc-proc-16",
    ];
    let results = measured(Peer::Postgres, 1, &names).await;
    assert_eq!(results.iter().map(|result| result.name).collect::<Vec<_>>(), names);
    for result in &results {
        let Outcome::Ratio { fulmar, of_peer, ratio, .. } = &result.outcome else {
            panic!("{}", result.line())
        };
        assert_eq!((fulmar.rounds.len(), of_peer.rounds.len()), (1, 1));
        assert!(fulmar.min > 0.0 && of_peer.min > 0.0, "{}", result.line());
        assert_eq!(*ratio, fulmar.median / of_peer.median);
    }
}

#[tokio::test]
async fn failing_case_does_not_affect_other_cases() {
    let names = ["log-bytes-ratio", "restart-ms", "idle-tenant-kib", "driver-us", "fair-share"];
    let results = measured(Peer::Postgres, 1, &names).await;
    let [idle, restart, fair, log, driver] = &results[..] else { panic!("{results:?}") };
    assert!(matches!(&fair.outcome, Outcome::Value { value } if value.min > 0.0), "{fair:?}");
    assert!(matches!(&driver.outcome, Outcome::Value { value } if value.min > 0.0), "{driver:?}");
    assert!(matches!(&idle.outcome, Outcome::Value { .. }), "{idle:?}");
    assert!(matches!(&restart.outcome, Outcome::Value { value } if value.min > 0.0), "{restart:?}");
    assert!(matches!(&log.outcome, Outcome::Failed { reason } if reason.contains("/metrics")), "{log:?}");
}

/// A case that measures one server is measured with both builds.
#[tokio::test]
async fn single_server_cases_are_measured_for_both_builds() {
    let results = measured(Peer::Before, 1, &["ycsb-8", "restart-ms", "log-bytes-ratio"]).await;
    let [ycsb, restart, log] = &results[..] else { panic!("{results:?}") };
    let differs = |result: &CaseResult| {
        let Outcome::Ratio { fulmar, peer: Peer::Before, of_peer, .. } = &result.outcome else {
            panic!("{}", result.line())
        };
        assert!(fulmar.min > 0.0 && of_peer.min > 0.0, "{}", result.line());
        fulmar != of_peer
    };
    // Transaction counts can be equal by chance. Equal restart times as well would mean that one
    // measurement was used twice.
    assert!(differs(ycsb) | differs(restart), "{} {}", ycsb.line(), restart.line());
    assert!(log.is_failed(), "PostgreSQL has no such metric: {}", log.line());
}

#[tokio::test]
async fn consolidation_cases_report_every_round() {
    let results = measured(Peer::Postgres, 2, &["noisy-neighbour", "hundred-tenants"]).await;
    for (result, noted) in results.iter().zip(["the noisy tenant requested", "with one tenant,"]) {
        let Outcome::Value { value } = &result.outcome else { panic!("{}", result.line()) };
        assert!(value.rounds.len() == 2 && value.min > 0.0, "{}", result.line());
        assert!(result.notes[0].contains(noted), "{:?}", result.notes);
    }
}

#[tokio::test]
async fn unknown_case_error_lists_the_cases_of_the_suite() {
    let error = wanted(Suite::Node, &["read-8".to_owned(), "read-9".to_owned()]).unwrap_err().to_string();
    assert!(
        error.contains("read-9") && error.contains("read-8") && error.contains("log-bytes-ratio"),
        "{error}"
    );
    let other = wanted(Suite::Tpcc, &["read-8".to_owned()]).unwrap_err().to_string();
    assert!(other.contains("tpcc-proc-16") && !other.contains("log-bytes-ratio"), "{other}");
}
