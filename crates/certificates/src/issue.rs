//! Issues certificates: an authority's own, and those of nodes.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, DnsName};

use crate::check::TrustedAuthorities;
use crate::{Error, check_name};

/// A certificate is valid this long before it was issued, so that nodes whose clocks are slow
/// accept it.
const CLOCK_SKEW: Duration = Duration::from_hours(24);

/// A new certificate and its private key, in PEM format.
pub struct Issued {
    /// The certificate.
    pub certificate_pem: String,
    /// The key. It must be kept secret.
    pub key_pem: String,
}

/// An authority that issues the certificates of a cluster's nodes.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Authority {
    /// Creates an authority: a self-signed certificate that is valid for `lifetime`.
    pub fn create(lifetime: Duration) -> Result<Issued, Error> {
        let mut params = params(lifetime);
        // Two authorities must not have the same name: a node that trusts one of them would report
        // certificates of the other one as damaged instead of foreign.
        let name = format!("Fulmar authority {:08x}", rand::random::<u32>());
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(cannot_issue)?;
        let certificate = params.self_signed(&key).map_err(cannot_issue)?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }

    /// Reads an authority's certificate and key.
    pub fn from_pem(certificate_pem: &str, key_pem: &str) -> Result<Authority, Error> {
        let certificate = CertificateDer::from_pem_slice(certificate_pem.as_bytes())
            .map_err(|error| Error(format!("the authority's certificate cannot be read ({error})")))?;
        let key = KeyPair::from_pem(key_pem)
            .map_err(|error| Error(format!("the authority's key cannot be read ({error})")))?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key)
            .map_err(|error| Error(format!("the authority's certificate cannot be read ({error})")))?;
        Ok(Authority { issuer, certificate })
    }

    /// Issues a certificate for the node `name`, which is also valid for the given host names and
    /// IP addresses.
    pub fn issue(&self, name: &str, addresses: &[String], lifetime: Duration) -> Result<Issued, Error> {
        check_node_name(name)?;
        let mut params = params(lifetime);
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names = vec![alternative_name(name)?];
        for address in addresses {
            let address = alternative_name(address)?;
            if !params.subject_alt_names.contains(&address) {
                params.subject_alt_names.push(address);
            }
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(cannot_issue)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(cannot_issue)?;
        let chain = [certificate.der().clone()];
        TrustedAuthorities::new([self.certificate.clone()])
            .and_then(|trusted| trusted.check(&chain, SystemTime::now()))
            .and_then(|()| check_name(&chain[0], name))
            .map_err(|_| {
                Error(
                    "the authority cannot issue certificates: its certificate and key do not match, or it \
                     has expired; create a new one with `fulmar cert authority`"
                        .to_owned(),
                )
            })?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }
}

/// Parameters without a name.
fn params(lifetime: Duration) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + lifetime).into();
    params
}

fn check_node_name(name: &str) -> Result<(), Error> {
    match DnsName::try_from(name) {
        Ok(_) if !name.ends_with('.') => Ok(()),
        _ => Err(Error(format!(
            "a certificate cannot contain the node name \"{name}\"; use letters, digits, hyphens and \
             underscores, and not only digits"
        ))),
    }
}

fn alternative_name(name: &str) -> Result<SanType, Error> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let invalid =
        || Error(format!("invalid address \"{name}\"; use a host name or an IP address, without a port"));
    check_node_name(name).map_err(|_| invalid())?;
    Ok(SanType::DnsName(name.try_into().map_err(|_| invalid())?))
}

fn cannot_issue(error: rcgen::Error) -> Error {
    Error(format!("cannot issue the certificate ({error}); check the authority's certificate and key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    fn authority() -> Authority {
        let issued = Authority::create(DAY).unwrap();
        Authority::from_pem(&issued.certificate_pem, &issued.key_pem).unwrap()
    }

    fn certificate(issued: &Issued) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap()
    }

    #[test]
    fn certificate_is_valid_for_the_node_and_its_addresses() {
        let addresses = ["db.example".to_owned(), "10.0.0.1".to_owned()];
        let issued = authority().issue("n_1-a", &addresses, DAY).unwrap();
        let certificate = certificate(&issued);
        for name in ["n_1-a", "db.example", "10.0.0.1"] {
            check_name(&certificate, name).unwrap();
        }
        let error = check_name(&certificate, "n2").unwrap_err().to_string();
        assert!(error.contains("n_1-a") && error.contains("\"n2\""), "{error}");
    }

    #[test]
    fn invalid_names_and_addresses_are_rejected() {
        let authority = authority();
        for name in ["", "a b", "../a", "7", "a.", "ü"] {
            let error = authority.issue(name, &[], DAY).err().expect(name);
            assert!(error.to_string().contains("use letters"), "{name}: {error}");
        }
        for address in ["db.example:5433", "http://db", ""] {
            let error = authority.issue("a", &[address.to_owned()], DAY).err().expect(address);
            assert!(error.to_string().contains("without a port"), "{address}: {error}");
        }
    }

    #[test]
    fn authority_with_the_key_of_another_one_issues_nothing() {
        let [one, two] = [(); 2].map(|()| Authority::create(DAY).unwrap());
        let mixed = Authority::from_pem(&one.certificate_pem, &two.key_pem).unwrap();
        let error = mixed.issue("a", &[], DAY).err().expect("a certificate was issued");
        assert!(error.to_string().contains("do not match"), "{error}");
        assert!(Authority::from_pem("", &one.key_pem).is_err());
        assert!(Authority::from_pem(&one.certificate_pem, &one.certificate_pem).is_err());
    }
}
