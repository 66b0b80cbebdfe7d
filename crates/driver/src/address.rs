//! Addresses of nodes.

use std::fmt;
use std::str::FromStr;

use tokio_postgres::Config;

/// Where a node listens for clients.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name or an IP address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl FromStr for Address {
    type Err = ();

    /// Reads `HOST:PORT`, with brackets around an IPv6 address.
    fn from_str(text: &str) -> Result<Address, ()> {
        let (host, port) = text.rsplit_once(':').ok_or(())?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(());
        }
        Ok(Address { host: host.to_owned(), port: port.parse().map_err(|_| ())? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The configuration of a connection to one node: that of the cluster with another host.
pub(crate) fn config_for(cluster: &Config, address: &Address, database: &str) -> Config {
    let mut config = Config::new();
    config.host(&address.host).port(address.port).dbname(database);
    if let Some(user) = cluster.get_user() {
        config.user(user);
    }
    if let Some(password) = cluster.get_password() {
        config.password(password);
    }
    if let Some(options) = cluster.get_options() {
        config.options(options);
    }
    if let Some(name) = cluster.get_application_name() {
        config.application_name(name);
    }
    if let Some(timeout) = cluster.get_connect_timeout() {
        config.connect_timeout(*timeout);
    }
    if let Some(timeout) = cluster.get_tcp_user_timeout() {
        config.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = cluster.get_keepalives_interval() {
        config.keepalives_interval(interval);
    }
    if let Some(retries) = cluster.get_keepalives_retries() {
        config.keepalives_retries(retries);
    }
    config
        .ssl_mode(cluster.get_ssl_mode())
        .ssl_negotiation(cluster.get_ssl_negotiation())
        .channel_binding(cluster.get_channel_binding())
        .keepalives(cluster.get_keepalives())
        .keepalives_idle(cluster.get_keepalives_idle());
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        for text in ["10.0.0.1:5433", "db.example:1", "[::1]:5432"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "db.example", ":5432", "db.example:", "db.example:70000"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn configuration_keeps_everything_but_the_hosts() {
        let cluster: Config = "host=a,b port=1,2 user=anna password=p dbname=x options='-c a.b=1' \
                               application_name=app connect_timeout=3 keepalives=0"
            .parse()
            .unwrap();
        let address = Address { host: "c".to_owned(), port: 3 };
        let expected: Config = "host=c port=3 user=anna password=p dbname=shop options='-c a.b=1' \
                                application_name=app connect_timeout=3 keepalives=0"
            .parse()
            .unwrap();
        assert_eq!(config_for(&cluster, &address, "shop"), expected);
    }
}
