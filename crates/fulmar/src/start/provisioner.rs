//! `--provisioner`: how the controller of a cluster adds nodes, and the arguments that they get.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use fulmar_elastic::provisioner::command::Command;
use fulmar_elastic::provisioner::processes::{Options, Processes};
use fulmar_elastic::provisioner::{Provisioner, ProvisionerUrl};
use fulmar_gateway::KeyMode;

use crate::cli::{MetaUrl, StartArgs};

/// The provisioner of this node, if it has one.
pub(super) fn open(arguments: &StartArgs, cluster: u128) -> anyhow::Result<Option<Arc<dyn Provisioner>>> {
    let Some(url) = arguments.cluster.provisioner.clone().map(ProvisionerUrl::absolute) else {
        return Ok(None);
    };
    let cluster = format!("{cluster:032x}");
    let provisioner: Arc<dyn Provisioner> = match &url {
        ProvisionerUrl::Command { program } => {
            ensure!(program.is_file(), "--provisioner {url}: there is no file {}", program.display());
            Arc::new(Command::new(program.clone(), cluster, shared(arguments)?))
        }
        ProvisionerUrl::Processes { directory, first_port, last_port } => {
            let certificate = arguments.cluster.rpc_tls.rpc_cert.as_deref().and_then(Path::parent);
            let options = Options {
                program: std::env::current_exe().context("cannot find this executable")?,
                cluster,
                directory: directory.clone(),
                host: arguments.cluster.rpc.context("--provisioner needs --rpc")?.ip(),
                ports: *first_port..=*last_port,
                arguments: [shared(arguments)?, place(arguments)].concat(),
                certificates: certificate.map(std::path::absolute).transpose()?,
            };
            Arc::new(Processes::new(options).with_context(|| format!("--provisioner {url}"))?)
        }
    };
    Ok(Some(provisioner))
}

/// Where this node is: its site and rack, which nodes on the same machine share.
fn place(arguments: &StartArgs) -> Vec<String> {
    let places = [("--site", &arguments.cluster.site), ("--rack", &arguments.cluster.rack)];
    let given = places.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value.clone()?]));
    given.flatten().collect()
}

/// The arguments that all nodes of the cluster have in common, as this node has them.
fn shared(arguments: &StartArgs) -> anyhow::Result<Vec<String>> {
    let cluster = &arguments.cluster;
    let mut shared = Vec::new();
    let mut add = |flag: &str, value: Option<String>| {
        if let Some(value) = value {
            shared.extend([flag.to_owned(), value]);
        }
    };
    match (&cluster.meta, &cluster.join) {
        (Some(MetaUrl::Embedded), _) => {
            let rpc = cluster.rpc.map(|rpc| rpc.to_string()).unwrap_or_default();
            let name = cluster.node.as_deref().unwrap_or_default();
            let has_tls = cluster.rpc_tls.rpc_ca.is_some();
            add("--join", Some(if has_tls { format!("{name}@{rpc}") } else { rpc }));
        }
        (Some(url), _) => add("--meta", Some(url.to_string())),
        (None, join) => add(
            "--join",
            join.as_ref().map(|join| match &join.name {
                Some(name) => format!("{name}@{}", join.address),
                None => join.address.to_string(),
            }),
        ),
    }
    let security = &cluster.meta_security;
    let files = [
        ("--meta-ca", &security.meta_ca),
        ("--meta-cert", &security.meta_cert),
        ("--meta-key", &security.meta_key),
        ("--meta-password-file", &security.meta_password_file),
        ("--rpc-ca", &cluster.rpc_tls.rpc_ca),
        ("--tls-cert", &arguments.tls_cert),
        ("--tls-key", &arguments.tls_key),
    ];
    for (flag, file) in files {
        // The working directory of the other nodes may be another one.
        let absolute = file.as_ref().map(std::path::absolute).transpose()?;
        add(flag, absolute.map(|file| file.to_string_lossy().into_owned()));
    }
    let sizes = [
        ("--memory", arguments.memory),
        ("--disk-reserve", arguments.disk_reserve),
        ("--disk-cache", arguments.disk_cache),
        ("--archives", cluster.archives),
        ("--statement-stack", Some(arguments.statement_stack)),
        ("--max-statement-size", Some(arguments.max_statement_size)),
    ];
    sizes.into_iter().for_each(|(flag, size)| add(flag, size.map(|size| size.0.to_string())));
    let load = &arguments.load;
    let key_monitoring = match load.key_monitoring {
        KeyMode::Off => "off",
        KeyMode::Auto => "auto",
        KeyMode::On => "on",
        KeyMode::Full => "full",
    };
    add("--cpus", load.cpus.map(|cpus| cpus.to_string()));
    add("--key-monitoring", Some(key_monitoring.to_owned()));
    add("--key-window", Some(load.key_window.to_string()));
    add("--key-count", Some(load.key_count.to_string()));
    add("--key-watermark", Some(load.key_watermark.to_string()));
    add("--meta-user", security.meta_user.clone());
    add("--store", arguments.store.as_ref().map(ToString::to_string));
    add("--slow-statement", Some(arguments.slow_statement.to_string()));
    let format = arguments.log_format.to_possible_value();
    add("--log-format", format.map(|format| format.get_name().to_owned()));
    add("--log-level", Some(arguments.log_level.clone()));
    // Each of them may become the controller.
    add("--provisioner", cluster.provisioner.clone().map(|url| url.absolute().to_string()));
    if arguments.insecure {
        shared.push("--insecure".to_owned());
    }
    if arguments.public_metrics {
        shared.push("--public-metrics".to_owned());
    }
    Ok(shared)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command as Subcommand};

    fn start(line: &str) -> StartArgs {
        match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
            Subcommand::Start(start) => *start,
            _ => panic!("parsed as another subcommand than start"),
        }
    }

    #[test]
    fn shared_arguments_start_a_node_like_this_one() {
        let common = "--meta etcd://h:1/shops --store file:///s --memory 64MB --insecure --site eu --tls-cert /c \
                      --tls-key /k --cpus 0.5 --key-monitoring on --provisioner processes:/nodes:7000-7099";
        let own = "--data d --sql 127.0.0.1:1 --http 127.0.0.1:2 --rpc 127.0.0.1:3 --node n1";
        let first = start(&format!("fulmar start {own} {common}"));
        let arguments = shared(&first).unwrap();
        assert_eq!(place(&first), ["--site", "eu"]);
        let other = "--data e --sql 127.0.0.1:4 --http 127.0.0.1:5 --rpc 127.0.0.1:6 --node n2";
        let second = start(&format!("fulmar start {other} {}", arguments.join(" ")));
        assert_eq!(shared(&second).unwrap(), arguments);
        assert_eq!((second.memory, second.insecure), (first.memory, true));
        assert_eq!((&second.cluster.site, &second.cluster.provisioner), (&None, &first.cluster.provisioner));
    }

    #[test]
    fn nodes_join_an_embedded_metadata_store() {
        let line = "fulmar start --data d --sql 127.0.0.1:1 --http 127.0.0.1:2 --rpc 127.0.0.1:3 --node n1";
        let arguments = shared(&start(&format!("{line} --meta embedded"))).unwrap();
        assert_eq!(arguments[..2], ["--join", "127.0.0.1:3"]);
        let tls = "--rpc-ca /ca --rpc-cert /n1.crt --rpc-key /n1.key";
        let arguments = shared(&start(&format!("{line} --meta embedded {tls}"))).unwrap();
        assert_eq!(arguments[..2], ["--join", "n1@127.0.0.1:3"]);
        assert!(!arguments.contains(&"--rpc-key".to_owned()), "each node has its own");
    }
}
