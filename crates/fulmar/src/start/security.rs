//! Loads the certificates and passwords with which a node connects to other nodes and to etcd.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_certificates::{PemFile, PemPair};
use fulmar_meta::{EtcdOptions, EtcdTls};
use fulmar_transport::tls::{NodeTls, NodeTlsFiles};

use crate::cli::{MetaSecurityArgs, RpcTlsArgs};

/// Loads the certificates for connections between nodes, if they are given. Without them, the
/// connections are not encrypted, and every program that reaches the address `rpc` can act as a
/// node.
pub(super) fn node_tls(
    arguments: &RpcTlsArgs,
    node: &str,
    rpc: SocketAddr,
) -> anyhow::Result<Option<Arc<NodeTls>>> {
    let RpcTlsArgs { rpc_ca: Some(ca), rpc_cert: Some(certificate), rpc_key: Some(key) } = arguments.clone()
    else {
        if !rpc.ip().is_loopback() {
            tracing::warn!(
                %rpc,
                "connections between nodes are neither encrypted nor authenticated"
            );
        }
        return Ok(None);
    };
    Ok(Some(NodeTls::load(NodeTlsFiles { ca, certificate, key }, node)?))
}

/// Adds the certificates and the user for etcd to `options`.
pub(super) fn secure_etcd(options: &mut EtcdOptions, arguments: &MetaSecurityArgs) -> anyhow::Result<()> {
    if let Some(ca) = &arguments.meta_ca {
        PemFile::new("--meta-ca", ca).certificates()?;
        let pair = arguments.meta_cert.as_ref().zip(arguments.meta_key.as_ref());
        let identity_pem = match pair {
            Some((certificate, key)) => {
                let certificate_file = PemFile::new("--meta-cert", certificate);
                PemPair { certificate: certificate_file, key: PemFile::new("--meta-key", key) }.read()?;
                Some((read("--meta-cert", certificate)?, read("--meta-key", key)?))
            }
            None => None,
        };
        options.tls = Some(EtcdTls { ca_pem: read("--meta-ca", ca)?, identity_pem });
    }
    if let Some((user, file)) = arguments.meta_user.as_ref().zip(arguments.meta_password_file.as_ref()) {
        let password = String::from_utf8(read("--meta-password-file", file)?)
            .with_context(|| format!("--meta-password-file {} is not UTF-8", file.display()))?;
        let password = password.trim_end_matches(['\r', '\n']);
        ensure!(!password.is_empty(), "--meta-password-file {} contains no password", file.display());
        options.user = Some((user.clone(), password.to_owned()));
    }
    Ok(())
}

fn read(flag: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {flag} {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_certificates::Authority;

    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    #[test]
    fn etcd_options_contain_certificates_and_the_password() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        let ca = Authority::create(DAY).unwrap();
        let issued =
            Authority::from_pem(&ca.certificate_pem, &ca.key_pem).unwrap().issue("n", &[], DAY).unwrap();
        let valid = MetaSecurityArgs {
            meta_ca: file("ca", &ca.certificate_pem),
            meta_cert: file("crt", &issued.certificate_pem),
            meta_key: file("key", &issued.key_pem),
            meta_user: Some("fulmar".to_owned()),
            meta_password_file: file("password", "secret word\r\n"),
        };
        let secured = |arguments: &MetaSecurityArgs| {
            let mut options = EtcdOptions::new(Vec::new(), "c");
            secure_etcd(&mut options, arguments).map(|()| options).map_err(|error| format!("{error:#}"))
        };
        let options = secured(&valid).unwrap();
        assert_eq!(options.user, Some(("fulmar".to_owned(), "secret word".to_owned())));
        let tls = options.tls.unwrap();
        assert_eq!(tls.ca_pem, ca.certificate_pem.as_bytes());
        assert_eq!(
            tls.identity_pem,
            Some((issued.certificate_pem.into_bytes(), issued.key_pem.into_bytes()))
        );
        let none = secured(&MetaSecurityArgs::default()).unwrap();
        assert!(none.tls.is_none() && none.user.is_none());
        for (invalid, text) in [
            (MetaSecurityArgs { meta_key: file("other", &ca.key_pem), ..valid.clone() }, "do not match"),
            (MetaSecurityArgs { meta_ca: file("empty", ""), ..valid.clone() }, "--meta-ca"),
            (MetaSecurityArgs { meta_password_file: file("empty", "\n"), ..valid.clone() }, "no password"),
            (MetaSecurityArgs { meta_password_file: Some("/nowhere".into()), ..valid }, "/nowhere"),
        ] {
            let error = secured(&invalid).err().expect(text);
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn node_tls_requires_a_certificate_for_the_name_of_the_node() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        let ca = Authority::create(DAY).unwrap();
        let issued =
            Authority::from_pem(&ca.certificate_pem, &ca.key_pem).unwrap().issue("n1", &[], DAY).unwrap();
        let arguments = RpcTlsArgs {
            rpc_ca: file("ca", &ca.certificate_pem),
            rpc_cert: file("crt", &issued.certificate_pem),
            rpc_key: file("key", &issued.key_pem),
        };
        let rpc = "127.0.0.1:1".parse().unwrap();
        assert!(node_tls(&arguments, "n1", rpc).unwrap().is_some());
        assert!(node_tls(&RpcTlsArgs::default(), "n1", rpc).unwrap().is_none());
        let error = node_tls(&arguments, "n2", rpc).unwrap_err().to_string();
        assert!(
            error.contains("--rpc-cert") && error.contains("valid for \"n1\", not for \"n2\""),
            "{error}"
        );
    }
}
