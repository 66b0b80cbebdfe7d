//! Classifies the errors of a request to etcd: whether it was carried out, and whether another
//! attempt can succeed.

use etcd_client::Error;
use tonic::{Code, ConnectError, Status};

use crate::MetaError;

/// A failed request.
#[derive(Debug)]
pub(super) enum Failure {
    /// It was not carried out. Another member, or a later attempt, may succeed.
    NotSent(String),
    /// No answer: it may have been carried out, or may still be.
    Unknown(String),
    /// The token was issued before the last change of etcd's users. Not carried out.
    TokenExpired(String),
    /// The requested revision has been compacted. Not carried out.
    Compacted,
    /// etcd, or this client, rejects it. Not carried out. Another attempt fails too.
    Rejected(MetaError),
}

impl Failure {
    pub(super) fn cause(&self) -> String {
        match self {
            Failure::NotSent(cause) | Failure::Unknown(cause) | Failure::TokenExpired(cause) => cause.clone(),
            Failure::Compacted => "the requested revision has been compacted".to_owned(),
            Failure::Rejected(error) => error.to_string(),
        }
    }

    pub(super) fn of(endpoint: &str, error: Error) -> Self {
        match error {
            Error::GRpcStatus(status) => of_status(endpoint, &status),
            Error::TransportError(error) if is_connect_error(&error) => {
                Failure::NotSent(format!("{endpoint}: {}", with_sources(&error)))
            }
            Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::InvalidMetadataValue(_) => {
                Failure::Rejected(MetaError::Unavailable {
                    cause: format!("cannot be reached at {endpoint}: {error}"),
                    remedy: "Correct --meta, which contains the HOST:PORT of etcd's members, or --meta-ca, --meta-cert and --meta-key.",
                })
            }
            error => Failure::Unknown(format!("{endpoint}: {error}")),
        }
    }
}

/// Errors that etcd returns before it proposes a request to the other members.
const NOT_PROPOSED: [&str; 4] = [
    "etcdserver: no leader",
    "etcdserver: not leader",
    "etcdserver: too many requests",
    "etcdserver: rpc not supported for learner",
];
const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const TOO_LARGE: &str = "etcdserver: request is too large";
const TOO_MANY_OPERATIONS: &str = "etcdserver: too many operations in txn request";
const CORRUPT: &str = "etcdserver: corrupt cluster";
const OLD_TOKEN: [&str; 2] = ["etcdserver: revision of auth store is old", "etcdserver: invalid auth token"];
const NO_USER: &str = "etcdserver: user name is empty";
const WRONG_PASSWORD: &str = "etcdserver: authentication failed, invalid user ID or password";
const AUTH_DISABLED: &str = "etcdserver: authentication is not enabled";

fn of_status(endpoint: &str, status: &Status) -> Failure {
    let message = status.message();
    if is_connect_error(status) {
        return Failure::NotSent(format!("{endpoint}: {}", with_sources(status)));
    }
    if NOT_PROPOSED.contains(&message) {
        return Failure::NotSent(format!("{endpoint}: {message}"));
    }
    if OLD_TOKEN.contains(&message) || status.code() == Code::Unauthenticated {
        return Failure::TokenExpired(format!("{endpoint}: {message}"));
    }
    match message {
        NO_SPACE => Failure::Rejected(MetaError::OutOfSpace {
            cause: format!("made no change: etcd at {endpoint} has exceeded its space quota (alarm NOSPACE)"),
            remedy: "Compact and defragment etcd, or raise --quota-backend-bytes; then run `etcdctl alarm \
                     disarm`. docs/etcd.md has the commands.",
        }),
        COMPACTED => Failure::Compacted,
        TOO_LARGE | TOO_MANY_OPERATIONS => Failure::Rejected(MetaError::Unavailable {
            cause: format!("rejected a change: etcd at {endpoint} has lower limits than the default"),
            remedy: "Set etcd's --max-txn-ops to at least 128 and --max-request-bytes to at least 1572864.",
        }),
        CORRUPT => Failure::Rejected(MetaError::Damaged {
            place: format!("etcd at {endpoint}"),
            cause: "has raised the alarm CORRUPT: its members have different data".to_owned(),
            remedy: "Replace the damaged member, or restore etcd from a backup.".to_owned(),
        }),
        NO_USER | WRONG_PASSWORD => Failure::Rejected(MetaError::PermissionDenied {
            cause: format!("rejects this node's user: etcd at {endpoint}: {message}"),
            remedy: "Set --meta-user and --meta-password-file to a user of etcd and its password.",
        }),
        AUTH_DISABLED => Failure::Rejected(MetaError::PermissionDenied {
            cause: format!("has no users: etcd at {endpoint}: {message}"),
            remedy: "Remove --meta-user, or run `etcdctl auth enable`.",
        }),
        _ => of_code(endpoint, status),
    }
}

fn of_code(endpoint: &str, status: &Status) -> Failure {
    let cause = || format!("{endpoint}: {}", with_sources(status));
    match status.code() {
        Code::PermissionDenied => Failure::Rejected(MetaError::PermissionDenied {
            cause: format!("denies permission: etcd at {}", cause()),
            remedy: "Grant the etcd user the permission readwrite on the prefix /fulmar/CLUSTER/.",
        }),
        Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented | Code::OutOfRange => {
            Failure::Rejected(MetaError::Unavailable {
                cause: format!("rejected a request: etcd at {}", cause()),
                remedy: "Check that the address is that of an etcd member.",
            })
        }
        _ => Failure::Unknown(cause()),
    }
}

/// Returns true if the connection failed before anything was sent over it.
fn is_connect_error(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<ConnectError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error with its sources: transport errors do not contain the texts of their causes.
fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = match error.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    };
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: Status) -> Failure {
        Failure::of("a:1", Error::GRpcStatus(status))
    }

    #[test]
    fn only_requests_that_etcd_did_not_propose_are_not_sent() {
        assert!(matches!(of(Status::unavailable("etcdserver: no leader")), Failure::NotSent(_)));
        for unknown in [
            Status::unavailable("etcdserver: request timed out, possibly due to previous leader failure"),
            Status::unavailable("etcdserver: leader changed"),
            Status::unavailable("etcdserver: server stopped"),
            Status::unavailable("connection reset"),
            Status::cancelled("stream closed"),
            Status::unknown("h2 protocol error"),
            Status::internal("eof"),
        ] {
            assert!(matches!(of(unknown.clone()), Failure::Unknown(_)), "{unknown}");
        }
    }

    #[test]
    fn rejections_name_the_remedy() {
        for (status, remedy) in [
            (Status::resource_exhausted(NO_SPACE), "alarm disarm"),
            (Status::invalid_argument(TOO_LARGE), "--max-request-bytes"),
            (Status::data_loss(CORRUPT), "backup"),
            (Status::permission_denied("etcdserver: permission denied"), "readwrite"),
            (Status::invalid_argument(NO_USER), "user"),
            (Status::failed_precondition(AUTH_DISABLED), "auth enable"),
        ] {
            let Failure::Rejected(error) = of(status.clone()) else { panic!("{status} is not rejected") };
            assert!(error.remedy().contains(remedy), "{status}: {}", error.remedy());
        }
    }
}
