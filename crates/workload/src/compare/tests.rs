//! Tests of the comparison at small sizes, with PostgreSQL on both sides, so that they do not need
//! Fulmar.

use super::*;

fn bench(rounds: u32) -> Bench {
    bench_against(Peer::Postgres, rounds)
}

fn bench_against(peer: Peer, rounds: u32) -> Bench {
    let options = CompareOptions {
        suite: Suite::Node,
        case: Vec::new(),
        seconds: 1,
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
    let wanted: Vec<_> = names.iter().map(|name| cases::case(name)).collect();
    let results = measure(&bench(1), &wanted).await;
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
    let wanted =
        ["log-bytes-ratio", "restart-ms", "idle-tenant-kib", "driver-us", "fair-share"].map(cases::case);
    let results = measure(&bench(1), &wanted).await;
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
    let wanted = ["ycsb-8", "restart-ms", "log-bytes-ratio"].map(cases::case);
    let results = measure(&bench_against(Peer::Before, 1), &wanted).await;
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
    let wanted = ["noisy-neighbour", "hundred-tenants"].map(cases::case);
    let results = measure(&bench(2), &wanted).await;
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
