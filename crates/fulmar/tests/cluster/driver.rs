//! The Rust driver connects to the owner of a database, and copes with outdated knowledge of it
//! (thesis of Karyakin, 3.1.5).

use fulmar_driver::{Address, Session};
use tokio_postgres::NoTls;

use super::{Cluster, create, move_to, owner, start, wait_until, with_timeout};

type Driver = fulmar_driver::Cluster<NoTls>;

/// A driver that knows these nodes.
fn driver(cluster: &Cluster, nodes: &[usize]) -> Driver {
    let mut config = tokio_postgres::Config::new();
    config.user("fulmar");
    for node in nodes {
        let target = cluster.target(*node);
        config.host(&target.host).port(target.port);
    }
    fulmar_driver::Cluster::new(config, NoTls)
}

fn address(cluster: &Cluster, node: usize) -> Address {
    let target = cluster.target(node);
    Address { host: target.host, port: target.port }
}

async fn insert(session: &Session, value: i64) {
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&value];
    let inserted = session.execute("INSERT INTO t VALUES ($1)", &values);
    with_timeout("an insert", inserted).await.unwrap_or_else(|error| panic!("{value}: {error:?}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn driver_follows_the_owner() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 1).await;

    // A new client knows one node, which does not own the database.
    let first = driver(&cluster, &[0]);
    let mut session = first.connect("shop").await.unwrap();
    assert_eq!((session.address(), session.owner()), (&address(&cluster, 1), None));
    assert_eq!(first.owner("shop"), Some(address(&cluster, 1)));
    insert(&session, 1).await;
    assert!(!first.follow(&mut session).await.unwrap(), "the owner is the same");

    // The database moves. The session continues, learns the new owner, and follows it.
    move_to(&cluster, 0, "shop", 2).await;
    insert(&session, 2).await;
    let new_owner = Some(address(&cluster, 2));
    wait_until("the session knows the new owner", async || session.owner() == new_owner).await;
    assert!(first.follow(&mut session).await.unwrap());
    assert_eq!((session.address(), session.owner()), (&address(&cluster, 2), None));

    // What another client knows is outdated.
    let late = driver(&cluster, &[0, 1, 2]);
    late.connect("shop").await.unwrap();
    move_to(&cluster, 0, "shop", 1).await;
    assert_eq!(late.owner("shop"), new_owner);
    let direct = late.connect("shop").await.unwrap();
    assert_eq!((direct.address(), direct.owner()), (&address(&cluster, 1), None));
    insert(&direct, 3).await;

    // The node that it knows is gone.
    drop(direct);
    cluster.kill(1).unwrap();
    let elsewhere = with_timeout("another owner", late.connect("shop")).await.unwrap();
    wait_until("the other owner is known", async || owner(&cluster, 0, "shop").await != 1).await;
    let now = owner(&cluster, 0, "shop").await;
    assert_eq!((elsewhere.address(), elsewhere.owner()), (&address(&cluster, now), None));
    insert(&elsewhere, 4).await;
}
