//! How the ports of a role's slot are laid out in the network's tables.
//!
//! A communicator that is one of a batch ([`super::batch`]) is a column of a table with one row per member. Ports of a slot that
//! are at the same position of all communicators of a batch are one *strip*: a row. They are posted, and come to an end, together.

use super::network::Network;
use super::role::Times;
use crate::units::SimTime;

/// A member of a communicator: ordered as the tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) batch: u32,
    /// Group rank.
    pub(super) position: u32,
    pub(super) column: u32,
}

/// Ports at one position of all communicators of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    pub(super) batch: u32,
    pub(super) position: u32,
    /// Place in the tables of the first.
    place: u32,
    /// Number of the first in order.
    from: u32,
    pub(super) width: u32,
    /// Port of column 0, and from one column to the next, unless ports are listed.
    pub(super) first: u32,
    step: u32,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Wiring {
    /// Ascending by batch and position.
    pub(super) strips: Vec<Strip>,
    /// Ports in the order of their addresses, if they are not evenly spaced in every strip.
    listed: Vec<u32>,
    pub(super) num_ports: u32,
    /// Place of the first port, if the places of all others follow in order.
    whole: Option<u32>,
    /// The only batch of the slot, if its members are all ports and they are in the order of the table.
    pub(super) private: Option<u32>,
    /// Batches, ascending, and how many ports each has.
    pub(super) parts: Vec<(u32, u32)>,
}

impl Wiring {
    /// The wiring of ports with these addresses. Where one port is, all others of its strip must be.
    pub(super) fn new(addresses: &[Address], network: &Network) -> Self {
        let order = in_order(addresses, network);
        let mut wiring = Self { num_ports: order.len() as u32, ..Self::default() };
        let (mut at, mut is_even) = (0, true);
        while let Some(&first) = order.get(at) {
            let Address { batch, position, .. } = addresses[first as usize];
            let (place, width) = network.row(batch, position);
            let ports = &order[at..at + width as usize];
            let step = ports.get(1).map_or(1, |second| second.wrapping_sub(first));
            is_even &= ports.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == step);
            wiring.strips.push(Strip { batch, position, place, from: at as u32, width, first, step });
            match wiring.parts.last_mut() {
                Some((last, count)) if *last == batch => *count += width,
                _ => wiring.parts.push((batch, width)),
            }
            at += width as usize;
        }
        if !is_even {
            wiring.listed = order;
        }
        wiring.find_whole(network);
        wiring
    }

    fn find_whole(&mut self, network: &Network) {
        let Some(first) = self.strips.first() else { return };
        let start = first.place;
        let follows = |strip: &Strip| strip.step == 1 && strip.first == strip.from && strip.place == start + strip.from;
        if !self.listed.is_empty() || !self.strips.iter().all(follows) {
            return;
        }
        self.whole = Some(start);
        let is_all = self.parts.len() == 1 && network.num_places(first.batch) == self.num_ports;
        self.private = is_all.then_some(first.batch);
    }

    /// Address of every port.
    pub(super) fn addresses(&self) -> Vec<Address> {
        let mut addresses = vec![Address { batch: 0, position: 0, column: 0 }; self.num_ports as usize];
        for strip in &self.strips {
            for column in 0..strip.width {
                let Strip { batch, position, .. } = *strip;
                addresses[self.port(strip, column)] = Address { batch, position, column };
            }
        }
        addresses
    }

    fn port(&self, strip: &Strip, column: u32) -> usize {
        if self.listed.is_empty() {
            strip.first.wrapping_add(strip.step.wrapping_mul(column)) as usize
        } else {
            self.listed[(strip.from + column) as usize] as usize
        }
    }

    /// Adds a port of a communicator that is alone in its batch, behind all others.
    pub(super) fn add(&mut self, batch: u32, position: u32, network: &Network) {
        let (place, width) = network.row(batch, position);
        assert_eq!(width, 1, "communicators of lanes are alone in their batches");
        let port = self.num_ports;
        self.whole = self.whole.filter(|start| place == start + port);
        self.private = None;
        if !self.listed.is_empty() {
            self.listed.push(port);
        }
        self.strips.push(Strip { batch, position, place, from: port, width, first: port, step: 1 });
        self.num_ports += 1;
        match self.parts.last_mut() {
            Some((last, count)) if *last == batch => *count += 1,
            _ => self.parts.push((batch, 1)),
        }
    }

    /// Number of the strip of a port, where every port is a strip.
    pub(super) fn strip_of(&self, port: usize) -> usize {
        let is_it = |strip: &Strip| self.port(strip, 0) == port;
        if is_it(&self.strips[port]) {
            port
        } else {
            self.strips.iter().position(is_it).expect("every port is a strip")
        }
    }

    /// Is the only strip that of all ports, in order?
    pub(super) fn is_row(&self) -> bool {
        self.strips.len() == 1 && self.whole.is_some()
    }

    /// Number of the strip at a position of a batch.
    pub(super) fn find(&self, batch: u32, position: u32) -> usize {
        if let [only] = &self.strips[..] {
            debug_assert_eq!((only.batch, only.position), (batch, position), "the slot has the strip");
            return 0;
        }
        let found = self.strips.binary_search_by_key(&(batch, position), |strip| (strip.batch, strip.position));
        found.expect("the slot has the strip")
    }

    /// Writes times of ports into a table.
    pub(super) fn put(&self, times: &[SimTime], table: &mut [SimTime]) {
        if let Some(start) = self.whole {
            table[start as usize..start as usize + times.len()].copy_from_slice(times);
            return;
        }
        for strip in &self.strips {
            if strip.width == 1 {
                table[strip.place as usize] = times[self.port(strip, 0)];
                continue;
            }
            let row = &mut table[strip.place as usize..(strip.place + strip.width) as usize];
            self.gather(strip, times, |at, time| row[at] = time);
        }
    }

    /// Raises times of ports to those of a table.
    pub(super) fn raise(&self, times: &mut [SimTime], table: &[SimTime]) {
        if let Some(start) = self.whole {
            super::vector::wait(times, &table[start as usize..start as usize + times.len()]);
            return;
        }
        for strip in &self.strips {
            let row = &table[strip.place as usize..(strip.place + strip.width) as usize];
            self.raise_strip(strip, times, row);
        }
    }

    /// Copies between tables what is of these ports, so much earlier by part.
    pub(super) fn copy_earlier(&self, from: &[SimTime], into: &mut [SimTime], earlier: &[SimTime]) {
        let mut part = 0;
        for strip in &self.strips {
            part += usize::from(self.parts[part].0 != strip.batch);
            let row = strip.place as usize..(strip.place + strip.width) as usize;
            super::vector::shift(&mut into[row.clone()], &from[row], SimTime(-earlier[part].0));
        }
    }

    /// Of times of ports that of a strip's first one.
    pub(super) fn first(&self, strip: &Strip, times: &[SimTime]) -> SimTime {
        times[self.port(strip, 0)]
    }

    /// Appends the times of a strip's ports, by column.
    pub(super) fn take(&self, strip: &Strip, times: &[SimTime], into: &mut Times) {
        if strip.step == 1 && self.listed.is_empty() {
            into.extend_from_slice(&times[strip.first as usize..(strip.first + strip.width) as usize]);
        } else {
            self.gather(strip, times, |_, time| into.push(time));
        }
    }

    fn gather(&self, strip: &Strip, times: &[SimTime], mut f: impl FnMut(usize, SimTime)) {
        if self.listed.is_empty() {
            let mut port = strip.first;
            for column in 0..strip.width as usize {
                f(column, times[port as usize]);
                port = port.wrapping_add(strip.step);
            }
        } else {
            let ports = &self.listed[strip.from as usize..(strip.from + strip.width) as usize];
            ports.iter().enumerate().for_each(|(column, port)| f(column, times[*port as usize]));
        }
    }

    /// Raises the times of a strip's ports to those of a row.
    pub(super) fn raise_strip(&self, strip: &Strip, times: &mut [SimTime], row: &[SimTime]) {
        if strip.step == 1 && strip.width > 1 && self.listed.is_empty() {
            super::vector::wait(&mut times[strip.first as usize..(strip.first + strip.width) as usize], row);
            return;
        }
        for (column, time) in (0..).zip(row) {
            let port = self.port(strip, column);
            times[port] = times[port].max(*time);
        }
    }

    /// One value per port from one per strip.
    pub(super) fn spread<T: Copy + Default>(&self, by_strip: &[T]) -> Vec<T> {
        let mut by_port = vec![T::default(); self.num_ports as usize];
        for (strip, value) in self.strips.iter().zip(by_strip) {
            (0..strip.width).for_each(|column| by_port[self.port(strip, column)] = *value);
        }
        by_port
    }

    /// One value per strip from one per port; those of a strip are equal.
    pub(super) fn fold<T: Copy>(&self, by_port: &[T]) -> Vec<T> {
        self.strips.iter().map(|strip| by_port[self.port(strip, 0)]).collect()
    }
}

/// Ports in the order of their addresses.
fn in_order(addresses: &[Address], network: &Network) -> Vec<u32> {
    let ports = 0..addresses.len() as u32;
    if addresses.is_sorted() {
        return ports.collect();
    }
    let place = |address: &Address| (network.row(address.batch, address.position).0 + address.column) as usize;
    let places: Vec<usize> = addresses.iter().map(place).collect();
    let first = places.iter().copied().min().unwrap_or(0);
    let span = places.iter().copied().max().map_or(0, |last| last - first + 1);
    if span > 4 * addresses.len() {
        let mut order: Vec<u32> = ports.collect();
        order.sort_unstable_by_key(|port| places[*port as usize]);
        return order;
    }
    // Close together: a table is faster than to sort.
    let mut table = vec![u32::MAX; span];
    ports.zip(&places).for_each(|(port, place)| table[place - first] = port);
    table.retain(|port| *port != u32::MAX);
    table
}
