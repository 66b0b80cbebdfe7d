//! The console in a real browser, on a real cluster. Requires Chromium, and the page, which
//! `make console` builds.
//!
//! With `FULMAR_SCREENSHOTS=directory` the test also writes the pictures of the documentation.

#[path = "../common/mod.rs"]
mod common;

mod browser;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use browser::Browser;
use common::{wait_until, with_timeout};
use fulmar_workload::server::{Cluster, ClusterSetup};
use serde_json::json;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// A name that must be shown as it is.
const HOSTILE: &str = "<img src=x onerror=\"document.title='hacked'\">";
const PAGES: [&str; 5] = ["#/", "#/tenants", "#/controller", "#/activity", "#/tenant/shop"];

/// The limit of event streams of a node.
const MAX_STREAMS: usize = 16;

async fn client(cluster: &Cluster, node: usize, database: &str) -> Client {
    let url = cluster.url(node, database);
    let connected = with_timeout("a connection", tokio_postgres::connect(&url, NoTls)).await;
    let (client, connection) = connected.unwrap();
    tokio::spawn(connection);
    client
}

async fn create_token(admin: &Client, definition: &str) -> String {
    let rows = admin.simple_query(&format!("CREATE TOKEN {definition}")).await.unwrap();
    let found = rows.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    found.unwrap()
}

async fn owner(admin: &Client, tenant: &str) -> String {
    let sql = "SELECT node FROM fulmar.partitions WHERE tenant = $1";
    admin.query_one(sql, &[&tenant]).await.unwrap().get(0)
}

/// Creates tenants with data, and reads from them until `stop` is set.
async fn create_tenants(cluster: &Cluster, admin: &Client, stop: &Arc<AtomicBool>) {
    let hostile = HOSTILE.replace('"', "\"\"");
    for (number, name) in ["shop", "bank", "forum", "mail", "tickets", &hostile].into_iter().enumerate() {
        admin.batch_execute(&format!("CREATE DATABASE \"{name}\"")).await.unwrap();
        if number == 5 {
            continue;
        }
        let rows = 200 * (6 - number);
        let client = client(cluster, number % cluster.nodes(), name).await;
        let fill = format!(
            "CREATE TABLE item (id INTEGER PRIMARY KEY, text TEXT); \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) \
             INSERT INTO item SELECT i, hex(randomblob(100)) FROM n"
        );
        client.batch_execute(&fill).await.unwrap();
        let stop = stop.clone();
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let read = client.query("SELECT count(*), max(text) FROM item WHERE id % 7 = 3", &[]).await;
                assert!(read.is_ok() || stop.load(Ordering::Relaxed), "{read:?}");
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        });
    }
    // One within its objective, and one far above it.
    for (name, objective) in [("shop", "10s"), ("bank", "1ms")] {
        let sql = format!("ALTER DATABASE {name} SET latency_objective = '{objective}'");
        admin.batch_execute(&sql).await.unwrap();
    }
}

/// Signs in. Tokens that must be refused are tried before.
fn sign_in(browser: &mut Browser, refused: &[(&str, &str)], token: &str) {
    for (wrong, reason) in refused {
        browser.focus("#token");
        browser.evaluate("document.querySelector('#token').value = ''");
        browser.enter(wrong);
        browser.press("Enter");
        browser.wait_for(&format!(
            "document.querySelector('#token-problem').textContent.includes({})",
            json!(reason)
        ));
        assert_eq!(browser.evaluate("sessionStorage.length"), json!(0), "a refused token must not be kept");
    }
    browser.focus("#token");
    browser.evaluate("document.querySelector('#token').value = ''");
    browser.enter(token);
    browser.press("Enter");
}

/// The card of a node has the tile of a tenant.
fn is_at(tenant: &str, node: &str) -> String {
    let card = format!("[data-node=\"{node}\"]");
    format!("document.querySelector({})", json!(format!("{card} [data-tenant=\"{tenant}\"]")))
}

/// Moves a tenant with the buttons of its page, by the keyboard.
fn move_tenant(browser: &mut Browser, tenant: &str, node: &str) {
    browser.focus(&format!("[data-tenant=\"{tenant}\"]"));
    browser.press("Enter");
    browser.wait_for("document.querySelector('#move:not(:disabled)')");
    browser.focus("#move");
    browser.press("Enter");
    browser.wait_for("document.querySelector('dialog[open]')");
    browser.evaluate(&format!("document.querySelector('#destination').value = {}", json!(node)));
    browser.focus("dialog button[type=submit]");
    browser.press("Enter");
    browser.wait_for("!document.querySelector('dialog')");
}

/// A slow statement is shown with its tenant, and on the tenant's page, without its constants.
async fn check_statements(browser: &mut Browser, shop: &Client) {
    let slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000) \
                SELECT count(*) AS total FROM n WHERE i <> 4711";
    shop.query(slow, &[]).await.unwrap();
    let shown = "SELECT count(*) AS total FROM n WHERE i <> ?";
    let is_listed = |selector: &str| {
        let (selector, shown) = (json!(selector), json!(shown));
        format!(
            "[...document.querySelectorAll({selector})].some((code) => code.textContent.includes({shown}))"
        )
    };
    browser.evaluate("location.hash = '#/activity'");
    browser.wait_for(&is_listed(".slow-statements code"));
    browser.evaluate("location.hash = '#/tenant/shop'");
    browser.wait_for(&is_listed(".top-statements code"));
    let texts =
        "[...document.querySelectorAll('.top-statements code')].map((code) => code.textContent).join()";
    let texts = browser.evaluate(texts);
    assert!(!texts.as_str().unwrap().contains("4711"), "{texts}");
    browser.evaluate("location.hash = '#/'");
    browser.wait_for("document.querySelector('#slow-statements-title')");
}

/// Every page fits into a window of 400 px.
fn check_narrow(browser: &mut Browser) {
    browser.set_window(400, 800, "light");
    for page in PAGES {
        browser.evaluate(&format!("location.hash = {}", json!(page)));
        browser.wait_for("document.querySelector('main section')");
        if page.contains("tenant/") {
            browser.wait_for("document.querySelectorAll('tbody tr').length > 5");
        }
        // Charts take their new size before the next frame.
        browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
        let width = browser.evaluate("document.documentElement.scrollWidth");
        assert!(width.as_f64().unwrap() <= 400.0, "{page} is {width} px wide");
    }
}

/// Names of tenants and other data are shown as text.
fn check_escaping(browser: &mut Browser) {
    browser.evaluate("location.hash = '#/'");
    let name = json!(HOSTILE);
    browser.wait_for(&format!(
        "[...document.querySelectorAll('.tile .name')].some((name) => name.textContent === {name})"
    ));
    browser.evaluate(&format!("location.hash = '#/tenant/' + encodeURIComponent({name})"));
    browser.wait_for(&format!("document.querySelector('.tenant-name').textContent === {name}"));
    assert_eq!(browser.evaluate("document.images.length"), json!(0));
    assert_ne!(browser.evaluate("document.title"), json!("hacked"));
}

/// Controls have names, and inputs have labels.
fn check_names(browser: &mut Browser) {
    for page in PAGES {
        browser.evaluate(&format!("location.hash = {}", json!(page)));
        browser.wait_for("document.querySelector('main section h2')");
        let unnamed = browser.evaluate(
            "[...document.querySelectorAll('a, button, input, select, progress')].filter((element) => \
               !element.hidden && !element.textContent.trim() && !element.getAttribute('aria-label') && \
               !element.labels?.length).map((element) => element.outerHTML)",
        );
        assert_eq!(unnamed, json!([]), "{page}");
        assert_eq!(browser.evaluate("document.querySelectorAll('h1').length"), json!(1), "{page}");
    }
}

/// The dialogs of a tenant's page, their messages, and the focus after them.
async fn check_actions(browser: &mut Browser, admin: &Client) {
    // Restore points are listed, and another time may be entered.
    browser.evaluate("location.hash = '#/tenant/shop'");
    let other =
        "[...document.querySelectorAll('button')].find((of) => of.textContent.startsWith('Restore to'))";
    browser.wait_for(&format!("{other} && !{other}.hidden"));
    let since = "[...document.querySelectorAll('.note')]\
                 .some((of) => /Any time since .*\\d:\\d\\d/.test(of.textContent))";
    browser.wait_for(since);
    browser.evaluate(&format!("{other}.click()"));
    browser.wait_for("document.querySelector('dialog #restore-time').required");
    // The server understands the time, and refuses it.
    browser.evaluate("document.querySelector('#restore-time').value = '2200-01-01T12:00:01'");
    browser.focus("#confirm-name");
    browser.enter("shop");
    browser.press("Enter");
    browser.wait_for("document.querySelector('dialog .problem').textContent.includes('future')");
    browser.press("Escape");
    browser.wait_for("!document.querySelector('dialog')");

    admin.batch_execute("CREATE DATABASE lent").await.unwrap();
    browser.evaluate("location.hash = '#/tenant/lent'");
    // The message is visible, and the focus stays in the section although the button was replaced.
    let pin = "[...document.querySelectorAll('.tenant-head button')].find((of) => of.textContent === 'Pin…')";
    browser.wait_for(&format!("{pin} && !{pin}.hidden && !{pin}.disabled"));
    browser.evaluate(&format!("{pin}.focus()"));
    browser.press("Enter");
    browser.focus("dialog button[type=submit]");
    browser.press("Enter");
    browser.wait_for("document.querySelector('.toast').textContent === 'lent is pinned.'");
    browser.wait_for(&format!("{pin}.hidden"));
    browser.wait_for("document.activeElement.matches('.tenant-head h2')");

    // Another database of that name is not the one that the dialog shows.
    browser.evaluate("document.querySelector('#move').click()");
    browser.wait_for("document.querySelector('dialog[open]')");
    for sql in ["ALTER DATABASE lent RENAME TO old", "CREATE DATABASE lent"] {
        admin.batch_execute(sql).await.unwrap();
    }
    browser.focus("dialog button[type=submit]");
    browser.press("Enter");
    browser.wait_for(
        "document.querySelector('dialog .problem').textContent.includes('not the one that the page shows')",
    );
    browser.press("Escape");
    browser.wait_for("!document.querySelector('dialog')");
    for name in ["lent", "old"] {
        admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await.unwrap();
    }
    browser.evaluate("location.hash = '#/'");
    browser.wait_for("document.querySelector('.stream-state').textContent === 'Live'");
}

/// Opens an event stream. Returns its connection, unless the node refuses it.
fn open_stream(port: u16, token: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request =
        format!("GET /console/api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut status = [0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut status).unwrap();
    status.ends_with(b"200").then_some(stream)
}

/// A page whose stream is refused states why, and claims nothing about the cluster.
fn check_refused_stream(browser: &mut Browser, port: u16, token: &str) {
    browser.open("about:blank");
    browser.wait_for("location.href === 'about:blank'");
    let mut streams = Vec::new();
    let began = Instant::now();
    while streams.len() < MAX_STREAMS {
        streams.extend(open_stream(port, token));
        assert!(began.elapsed() < common::WAIT_TIMEOUT, "the page's stream must end with the page");
    }
    browser.open(&format!("http://127.0.0.1:{port}/console/"));
    let banner = "document.querySelector('.banner')?.textContent";
    browser.wait_for(&format!("{banner}.includes('too many concurrent requests of consoles')"));
    browser.wait_for("document.querySelector('.stream-state').textContent === 'Reconnecting…'");
    browser.wait_for("document.querySelector('.summary').textContent === 'Loading…'");
    let empty = "[...document.querySelectorAll('.rows + .empty')].map((of) => of.textContent).join()";
    assert_eq!(browser.evaluate(empty), json!(["Loading…"; 4].join(",")));
    drop(streams);
    browser.wait_for("document.querySelector('.stream-state').textContent === 'Live'");
    browser.wait_for(&format!("{banner} === ''"));
}

fn screenshots(browser: &mut Browser) {
    let Ok(directory) = std::env::var("FULMAR_SCREENSHOTS") else { return };
    let shots = [
        ("light", "#/", 1200, 1080),
        ("dark", "#/", 1200, 1080),
        ("dark", "#/tenant/shop", 1200, 1080),
        ("light", "#/", 400, 1000),
    ];
    for ((scheme, page, width, height), name) in shots.into_iter().zip(["light", "dark", "tenant", "narrow"])
    {
        browser.set_window(width, height, scheme);
        browser.evaluate(&format!("location.hash = {}", json!(page)));
        browser.wait_for("document.querySelector('main section .u-over')");
        // Two updates of the stream, so that everything is drawn in the new size.
        browser.evaluate("new Promise((done) => setTimeout(done, 3000))");
        browser.screenshot(&Path::new(&directory).join(format!("console-{name}.png")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn operator_watches_and_moves_a_tenant() {
    let arguments = ["--slow-statement", "40"].map(str::to_owned).to_vec();
    let setup = ClusterSetup { nodes: 3, arguments, ..ClusterSetup::default() };
    let cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    let (admin, stop) = (client(&cluster, 0, "fulmar").await, Arc::<AtomicBool>::default());
    create_tenants(&cluster, &admin, &stop).await;
    let (token, scraper) =
        (create_token(&admin, "ops FOR ADMIN").await, create_token(&admin, "scraper").await);

    let mut browser = Browser::start();
    browser.set_window(1200, 900, "light");
    browser.open(&format!("http://127.0.0.1:{}/console", cluster.http_port(0)));
    browser.wait_for("document.querySelector('h1')");
    let is_built = browser.evaluate("document.querySelector('#app') !== null");
    assert_eq!(is_built, json!(true), "build the page first: make console");
    let refused =
        [("fulmar_wrong", "token unknown or expired"), (&*scraper, "this token only shows metrics")];
    sign_in(&mut browser, &refused, &token);

    // The map shows the nodes, and each tenant at its owner.
    let names = "[...document.querySelectorAll('.node h3')].map((name) => name.textContent).join()";
    browser.wait_for(&format!("{names} === 'n1,n2,n3'"));
    let from = owner(&admin, "shop").await;
    browser.wait_for(&is_at("shop", &from));
    browser.wait_for("document.querySelector('.tile.within [data-tenant=shop]')");
    assert_eq!(browser.evaluate("location.href.includes('fulmar_') || document.cookie !== ''"), json!(false));
    assert_eq!(browser.evaluate("localStorage.length"), json!(0));

    // A move by the button happens, and shows up.
    let to = if from == "n2" { "n3" } else { "n2" };
    move_tenant(&mut browser, "shop", to);
    wait_until("the move", async || owner(&admin, "shop").await == to).await;
    browser.wait_for(&format!("document.querySelector('.tenant-head .note').textContent === 'at {to}'"));
    browser.wait_for("document.querySelector('.moves .step')?.textContent === 'moved'");
    browser.evaluate("location.hash = '#/'");
    browser.wait_for(&is_at("shop", to));

    check_statements(&mut browser, &client(&cluster, 0, "shop").await).await;
    check_actions(&mut browser, &admin).await;
    check_refused_stream(&mut browser, cluster.http_port(0), &token);
    check_escaping(&mut browser);
    check_names(&mut browser);
    check_narrow(&mut browser);
    let background = "getComputedStyle(document.documentElement).backgroundColor";
    let light = browser.evaluate(background);
    browser.set_window(1200, 900, "dark");
    assert_ne!(browser.evaluate(background), light, "the dark scheme must have other colours");
    screenshots(&mut browser);

    // A dropped token ends the page's stream, and signs the operator out.
    admin.batch_execute("DROP TOKEN ops").await.unwrap();
    browser.wait_for("document.querySelector('#token-problem')?.textContent.includes('token was dropped')");
    assert_eq!(browser.evaluate("sessionStorage.length"), json!(0));
    assert!(browser.problems.is_empty(), "{:?}", browser.problems);
    stop.store(true, Ordering::Relaxed);
}
