//! The model of nodes and tenants.
//!
//! **Latency.** A node is a queue with one server (M/M/1). At the utilisation `u` the mean latency
//! is `service_ms / (1 - u)`, at most 100 times `service_ms`. With an objective of 5 times
//! `service_ms` a tenant is late from 80 % utilisation on.
//!
//! **Moves.** A node takes part in one move at a time. A move takes what the planners predict
//! ([`crate::plan::CostModel`]). While a node takes part in moves it loses [`MOVE_OVERHEAD`] of its
//! capacity.
//!
//! **Tenants.** The tenant of rank `i` has a weight of `1 / sqrt(i)`, and at most a quarter of a
//! node. At the time `t` its load is `weight * trace(t) * drift(t)`, with `drift = 1 + 0.3 sin(2 pi
//! (t / P + phase))`, a period `P` of 2 to 12 hours and a phase that depend on the tenant. Drift is
//! what makes balancing necessary. The whole load has noise of 1 % (uniform). A tenant has 50 to
//! 250 MB.

use crate::picture::{Node, Partition, Picture};

/// The mean service time of a request, in milliseconds.
pub const SERVICE_MS: f64 = 5.0;

/// The latency that every tenant was promised, in milliseconds.
pub const OBJECTIVE_MS: f64 = 5.0 * SERVICE_MS;

/// The share of its capacity that a node loses while it takes part in moves.
pub const MOVE_OVERHEAD: f64 = 0.05;

/// The utilisation that the clairvoyant plan and static provisioning fill nodes to.
pub const CLAIRVOYANT_UTILISATION: f64 = 0.8;

/// The load of the busiest tenant at the peak, as a share of a node's capacity.
const MAX_TENANT: f64 = 0.25;

const DRIFT: f64 = 0.3;
const NOISE: f64 = 0.01;

/// The mean latency at a utilisation, in milliseconds.
pub fn latency_ms(utilisation: f64) -> f64 {
    SERVICE_MS / (1.0 - utilisation).max(0.01)
}

/// A number from 0 to 1 that depends on two numbers (SplitMix64).
pub(crate) fn uniform(left: u64, right: u64) -> f64 {
    let mut bits = left.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ right.wrapping_mul(0xD1B5_4A32_D192_ED03);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

/// The tenants: their loads at the peak of a trace, and how they drift.
pub(crate) struct Tenants {
    /// The load at the peak, in CPUs.
    weight: Vec<f64>,
    period_s: Vec<f64>,
    phase: Vec<f64>,
}

impl Tenants {
    /// Tenants whose loads add up to `peak` CPUs at the peak, without drift and noise.
    pub(crate) fn new(count: usize, peak: f64, node_capacity: f64) -> Tenants {
        let mut weight: Vec<f64> = (1..=count).map(|rank| 1.0 / (rank as f64).sqrt()).collect();
        let limit = MAX_TENANT * node_capacity;
        // Cutting the largest ones raises the others, so it is repeated.
        for _ in 0..20 {
            let sum: f64 = weight.iter().sum();
            weight.iter_mut().for_each(|weight| *weight = (*weight * peak / sum).min(limit));
        }
        let of_tenant = |salt: u64| (0..count as u64).map(move |tenant| uniform(tenant, salt));
        Tenants {
            weight,
            period_s: of_tenant(1).map(|part| (2.0 + 10.0 * part) * 3600.0).collect(),
            phase: of_tenant(2).collect(),
        }
    }

    /// The load of a tenant at a step of a trace, in CPUs.
    pub(crate) fn load(&self, tenant: usize, step: usize, at_s: f64, share: f64) -> f64 {
        let turns = at_s / self.period_s[tenant] + self.phase[tenant];
        let drift = 1.0 + DRIFT * (std::f64::consts::TAU * turns).sin();
        let noise = 1.0 + NOISE * (2.0 * uniform(step as u64, 3) - 1.0);
        self.weight[tenant] * share * drift * noise
    }

    pub(crate) fn len(&self) -> usize {
        self.weight.len()
    }

    /// The cluster at the start: tenants dealt out to nodes by their loads, back and forth.
    pub(crate) fn picture(&self, nodes: usize, node_capacity: f64) -> Picture {
        let names: Vec<String> = (0..nodes).map(|node| format!("n{node}")).collect();
        let partition = |tenant: usize| {
            let (round, position) = (tenant / nodes, tenant % nodes);
            let owner = if round.is_multiple_of(2) { position } else { nodes - 1 - position };
            Partition {
                bytes: (50e6 + 200e6 * uniform(tenant as u64, 4)) as u64,
                objective_ms: Some(OBJECTIVE_MS),
                ..Partition::new(format!("t{tenant}"), names[owner].clone(), 0.0)
            }
        };
        let partitions = (0..self.len()).map(partition).collect();
        let nodes = names.iter().map(|name| Node::new(name.clone(), node_capacity)).collect();
        Picture { at_s: 0.0, nodes, partitions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_crosses_the_objective_at_eighty_percent() {
        assert!(latency_ms(0.79) < OBJECTIVE_MS && latency_ms(0.81) > OBJECTIVE_MS);
        assert_eq!(latency_ms(2.0), 100.0 * SERVICE_MS, "an overloaded node has a bounded latency");
    }

    #[test]
    fn tenants_add_up_to_the_peak() {
        let tenants = Tenants::new(1000, 16.0, 1.0);
        let sum: f64 = tenants.weight.iter().sum();
        assert!((sum - 16.0).abs() < 0.01, "{sum}");
        assert!(tenants.weight.iter().all(|weight| *weight <= MAX_TENANT));
        let picture = tenants.picture(20, 1.0);
        picture.validate().expect("the picture is valid");
    }
}
