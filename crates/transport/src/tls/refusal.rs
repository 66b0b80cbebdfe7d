//! Why a TLS handshake failed, with the remedy.

use std::io;

use fulmar_certificates::{Role, describe};
use rustls::AlertDescription;

use crate::Error;

/// A name for a peer that has dialed this node, and has not stated which node it is.
pub(super) const DIALING_NODE: &str = "the dialing node";

/// The remedy if one node uses TLS and the other one does not.
pub(crate) const ALL_OR_NONE: &str =
    "start all nodes of the cluster with --rpc-ca, --rpc-cert and --rpc-key, or all without them";

/// A handshake, by the other end.
#[derive(Clone, Copy)]
pub(super) enum Handshake<'a> {
    /// With the node that this node dials.
    With(&'a str),
    /// With the node that dialed this node.
    WithDialingNode,
}

impl<'a> Handshake<'a> {
    fn label(self) -> &'a str {
        match self {
            Handshake::With(label) => label,
            Handshake::WithDialingNode => DIALING_NODE,
        }
    }

    fn role(self) -> Role {
        match self {
            Handshake::With(_) => Role::Server,
            Handshake::WithDialingNode => Role::Client,
        }
    }
}

/// Returns the error for a failed handshake.
pub(super) fn refusal(error: io::Error, handshake: Handshake<'_>) -> Error {
    let label = handshake.label();
    let text = match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(reason)) => {
            format!("{label} was rejected: its certificate {}", describe(reason, handshake.role()))
        }
        Some(rustls::Error::NoCertificatesPresented) => {
            format!("{label} was rejected: it has no certificate; {ALL_OR_NONE}")
        }
        Some(rustls::Error::AlertReceived(alert)) => rejection(*alert, handshake),
        Some(rustls::Error::InvalidMessage(_)) => {
            format!("{label} does not use TLS between nodes; {ALL_OR_NONE}")
        }
        Some(rustls::Error::PeerIncompatible(reason)) => {
            format!("{label} does not support TLS 1.3 ({reason:?}); check the address, and upgrade the node")
        }
        Some(error) => format!("TLS handshake with {label} failed: {error}; check the address"),
        None if is_disconnect(error.kind()) => {
            format!(
                "{label} closed the connection during the TLS handshake; if it does not use TLS, {ALL_OR_NONE}"
            )
        }
        None => return error.into(),
    };
    Error::Refused(text)
}

fn is_disconnect(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// Describes the alert with which the peer has rejected this node.
fn rejection(alert: AlertDescription, handshake: Handshake<'_>) -> String {
    let label = handshake.label();
    let usage = match handshake.role() {
        Role::Server => "clientAuth",
        Role::Client => "serverAuth",
    };
    let reason = match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it was issued by another authority than those in the peer's --rpc-ca; issue it with `fulmar cert \
             node` and the authority of this cluster"
                .to_owned()
        }
        AlertDescription::CertificateExpired => {
            "it has expired, or is not valid yet; issue a new one with `fulmar cert node`, and check the clocks of \
             the nodes"
                .to_owned()
        }
        AlertDescription::UnsupportedCertificate => {
            format!("its extended key usage must contain {usage}; issue it with `fulmar cert node`")
        }
        AlertDescription::CertificateRequired => {
            format!("it is missing; {ALL_OR_NONE}")
        }
        AlertDescription::BadCertificate => {
            "it is not valid for the name of this node that the peer expects, or it is damaged; check the address \
             of the node, and issue a new one with `fulmar cert node`"
                .to_owned()
        }
        AlertDescription::ProtocolVersion => {
            return format!("{label} does not support TLS 1.3; check the address, and upgrade the node");
        }
        alert => return format!("{label} ended the TLS handshake: {alert:?}; its log contains the reason"),
    };
    format!("{label} rejected the certificate of this node (--rpc-cert): {reason}")
}
