//! Draws the random inputs of transactions (clauses 2.4.1 to 2.8.1).

use rand::RngExt;

use super::options::{DISTRICTS, Tpcc};
use super::random::{Constants, write_last_name};
use crate::keys::{Distribution, Keys};
use crate::workload::{Random, TerminalId};

/// A transaction and its inputs.
#[derive(Debug)]
pub(super) enum Input {
    NewOrder(NewOrder),
    Payment(Payment),
    OrderStatus(OrderStatus),
    Delivery(Delivery),
    StockLevel(StockLevel),
}

/// An order of a customer.
#[derive(Debug)]
pub(super) struct NewOrder {
    pub(super) warehouse: i32,
    pub(super) district: i32,
    pub(super) customer: i32,
    /// Ordered by supplier and item, except for an unknown item, which is last.
    pub(super) lines: Vec<Line>,
    /// The last item does not exist, so the order must be rolled back (1 % of the orders).
    pub(super) unknown_item: bool,
}

impl NewOrder {
    /// Returns true if the home warehouse supplies all lines.
    pub(super) fn is_local(&self) -> bool {
        self.lines.iter().all(|line| line.supplier == self.warehouse)
    }
}

/// A line of an order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) supplier: i32,
    pub(super) item: i32,
    pub(super) quantity: i32,
}

/// A customer, given by number or (60 %) by last name.
#[derive(Debug)]
pub(super) enum Customer {
    Number(i32),
    LastName(Vec<u8>),
}

/// A payment at a district, by a customer of this or of another district.
#[derive(Debug)]
pub(super) struct Payment {
    pub(super) warehouse: i32,
    pub(super) district: i32,
    pub(super) customer_warehouse: i32,
    pub(super) customer_district: i32,
    pub(super) customer: Customer,
    pub(super) amount_cents: i64,
}

/// A query for the last order of a customer.
#[derive(Debug)]
pub(super) struct OrderStatus {
    pub(super) warehouse: i32,
    pub(super) district: i32,
    pub(super) customer: Customer,
}

/// The delivery of the oldest open order of each district.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) warehouse: i32,
    pub(super) carrier: i32,
}

/// A query for items whose stock is below a threshold.
#[derive(Debug)]
pub(super) struct StockLevel {
    pub(super) warehouse: i32,
    pub(super) district: i32,
    pub(super) threshold: i32,
}

/// The home warehouse of a terminal's transactions.
enum Home {
    /// Always the terminal's own warehouse, as in the specification.
    Fixed(u32),
    Drawn(Keys),
}

impl Home {
    /// Terminals are assigned to the warehouses round-robin.
    fn new(scale: &Tpcc, terminal: usize) -> Home {
        match scale.distribution {
            Distribution::Uniform => Home::Fixed((terminal % scale.warehouses as usize) as u32 + 1),
            skewed => Home::Drawn(Keys::new(skewed, scale.warehouses)),
        }
    }

    fn draw(&self, random: &mut Random) -> u32 {
        match self {
            Home::Fixed(warehouse) => *warehouse,
            Home::Drawn(warehouses) => warehouses.draw(random) + 1,
        }
    }
}

/// Draws the inputs of a terminal.
pub(super) struct Inputs {
    scale: Tpcc,
    home: Home,
    /// The district for stock-level, which is fixed for a terminal.
    district: u32,
    constants: Constants,
    pub(super) random: Random,
}

/// Converts a row number, which is far below the maximum of `INTEGER`.
fn sql(number: u32) -> i32 {
    number as i32
}

impl Inputs {
    pub(super) fn new(scale: &Tpcc, place: TerminalId) -> Inputs {
        let round = place.number / scale.warehouses as usize;
        Inputs {
            scale: scale.clone(),
            home: Home::new(scale, place.number),
            district: (round % DISTRICTS as usize) as u32 + 1,
            constants: Constants::of_run(place.seed),
            random: place.random(),
        }
    }

    fn percent(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn any_district(&mut self) -> u32 {
        self.random.random_range(1..=DISTRICTS)
    }

    /// Returns a warehouse other than `home` with a probability of `percent` per cent, and `home`
    /// otherwise.
    fn maybe_remote(&mut self, home: u32, percent: u32) -> u32 {
        if self.scale.one_warehouse || self.scale.warehouses == 1 || !self.percent(percent) {
            return home;
        }
        let other = self.random.random_range(1..self.scale.warehouses);
        if other < home { other } else { other + 1 }
    }

    fn customer(&mut self) -> Customer {
        if self.percent(60) {
            let mut name = Vec::new();
            write_last_name(self.constants.last_name(self.scale.last_names(), &mut self.random), &mut name);
            Customer::LastName(name)
        } else {
            Customer::Number(sql(self.constants.customer(self.scale.customers, &mut self.random)))
        }
    }

    pub(super) fn new_order(&mut self) -> NewOrder {
        let warehouse = self.home.draw(&mut self.random);
        let district = self.any_district();
        let customer = self.constants.customer(self.scale.customers, &mut self.random);
        let count = self.random.random_range(5..=15);
        let unknown_item = self.percent(1);
        let mut lines: Vec<Line> = (0..count)
            .map(|_| Line {
                item: sql(self.constants.item(self.scale.items, &mut self.random)),
                supplier: sql(self.maybe_remote(warehouse, 1)),
                quantity: self.random.random_range(1..=10),
            })
            .collect();
        lines.sort_unstable_by_key(|line| (line.supplier, line.item));
        if let Some(last) = lines.last_mut().filter(|_| unknown_item) {
            last.item = sql(self.scale.items + 1);
        }
        NewOrder {
            warehouse: sql(warehouse),
            district: sql(district),
            customer: sql(customer),
            lines,
            unknown_item,
        }
    }

    pub(super) fn payment(&mut self) -> Payment {
        let (warehouse, district) = (self.home.draw(&mut self.random), self.any_district());
        let customer_warehouse = self.maybe_remote(warehouse, 15);
        let customer_district = if customer_warehouse == warehouse { district } else { self.any_district() };
        Payment {
            warehouse: sql(warehouse),
            district: sql(district),
            customer_warehouse: sql(customer_warehouse),
            customer_district: sql(customer_district),
            customer: self.customer(),
            amount_cents: self.random.random_range(100..=500_000),
        }
    }

    pub(super) fn order_status(&mut self) -> OrderStatus {
        let (warehouse, district) = (self.home.draw(&mut self.random), self.any_district());
        OrderStatus { warehouse: sql(warehouse), district: sql(district), customer: self.customer() }
    }

    pub(super) fn delivery(&mut self) -> Delivery {
        let warehouse = self.home.draw(&mut self.random);
        Delivery { warehouse: sql(warehouse), carrier: self.random.random_range(1..=10) }
    }

    pub(super) fn stock_level(&mut self) -> StockLevel {
        let warehouse = self.home.draw(&mut self.random);
        StockLevel {
            warehouse: sql(warehouse),
            district: sql(self.district),
            threshold: self.random.random_range(10..=20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 40_000;

    fn inputs(scale: Tpcc) -> Inputs {
        Inputs::new(&scale, TerminalId { tenant: 0, number: 0, of: 1, seed: 5 })
    }

    fn near(count: usize, of: usize, share: f64) -> bool {
        let (expected, deviation) = (of as f64 * share, (of as f64 * share * (1.0 - share)).sqrt());
        (count as f64 - expected).abs() < 5.0 * deviation
    }

    #[test]
    fn orders_match_the_specification() {
        let scale = Tpcc { warehouses: 10, ..Tpcc::default() };
        let mut inputs = inputs(scale.clone());
        let orders: Vec<NewOrder> = (0..DRAWS).map(|_| inputs.new_order()).collect();
        let count = |wanted: &dyn Fn(&NewOrder) -> bool| orders.iter().filter(|order| wanted(order)).count();
        for lines in 5..=15 {
            assert!(near(count(&|order| order.lines.len() == lines), DRAWS, 1.0 / 11.0), "{lines} lines");
        }
        assert!(near(count(&|order| order.unknown_item), DRAWS, 0.01));
        let lines: Vec<Line> = orders.iter().flat_map(|order| order.lines.clone()).collect();
        assert!(near(lines.iter().filter(|line| line.supplier != 1).count(), lines.len(), 0.01));
        assert!(
            lines.iter().all(|line| (1..=10).contains(&line.quantity) && (1..=10).contains(&line.supplier))
        );
        for order in &orders {
            let known = order.lines.len() - usize::from(order.unknown_item);
            assert!(order.lines[..known].is_sorted_by_key(|line| (line.supplier, line.item)));
            assert!(order.lines[..known].iter().all(|line| (1..=100_000).contains(&line.item)));
            assert!(order.lines[known..].iter().all(|line| line.item == 100_001));
            assert!((1..=10).contains(&order.district) && (1..=3000).contains(&order.customer));
        }
    }

    #[test]
    fn payments_match_the_specification() {
        let mut inputs = inputs(Tpcc { warehouses: 10, ..Tpcc::default() });
        let payments: Vec<Payment> = (0..DRAWS).map(|_| inputs.payment()).collect();
        let count =
            |wanted: &dyn Fn(&Payment) -> bool| payments.iter().filter(|payment| wanted(payment)).count();
        assert!(near(count(&|payment| payment.customer_warehouse != payment.warehouse), DRAWS, 0.15));
        assert!(near(count(&|payment| matches!(payment.customer, Customer::LastName(_))), DRAWS, 0.6));
        let at_home = |payment: &Payment| payment.customer_warehouse == payment.warehouse;
        assert!(
            payments.iter().all(|payment| !at_home(payment) || payment.customer_district == payment.district)
        );
        assert!(payments.iter().all(|payment| (100..=500_000).contains(&payment.amount_cents)));
    }

    #[test]
    fn one_warehouse_option_prevents_remote_transactions() {
        for scale in [Tpcc { warehouses: 10, one_warehouse: true, ..Tpcc::default() }, Tpcc::default()] {
            let mut inputs = inputs(scale);
            for _ in 0..2_000 {
                assert!(inputs.new_order().is_local());
                let payment = inputs.payment();
                assert_eq!(payment.warehouse, payment.customer_warehouse);
            }
        }
    }

    #[test]
    fn terminals_have_a_fixed_warehouse_unless_the_distribution_is_skewed() {
        let scale = Tpcc { warehouses: 3, ..Tpcc::default() };
        for number in 0..7 {
            let place = TerminalId { tenant: 0, number, of: 7, seed: 5 };
            let mut inputs = Inputs::new(&scale, place);
            let home = (number % 3) as i32 + 1;
            assert!(
                (0..100).all(|_| inputs.new_order().warehouse == home && inputs.payment().warehouse == home)
            );
        }
        let skew = Distribution::HighSkew { operations_percent: 60.0, hot_keys: 3 };
        let mut inputs = inputs(Tpcc { warehouses: 100, distribution: skew, ..Tpcc::default() });
        let mut counts = [0; 100];
        (0..DRAWS).for_each(|_| counts[inputs.delivery().warehouse as usize - 1] += 1);
        let hot = counts[..3].iter().sum::<usize>() as f64 / DRAWS as f64;
        assert!((0.6..0.75).contains(&hot), "share of E-Store's three hot warehouses: {hot}");
        assert!(counts.iter().all(|count| *count > 0), "every warehouse must be drawn");
    }

    #[test]
    fn drawn_customers_exist() {
        let mut inputs = inputs(Tpcc { customers: 30, items: 20, ..Tpcc::default() });
        let mut names = vec![Vec::new(); 30];
        (0..).zip(&mut names).for_each(|(number, name)| write_last_name(number, name));
        for _ in 0..2_000 {
            match inputs.order_status().customer {
                Customer::Number(number) => assert!((1..=30).contains(&number)),
                Customer::LastName(name) => assert!(names.contains(&name)),
            }
        }
    }
}
