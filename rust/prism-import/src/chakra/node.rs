//! A node of a Chakra execution trace, whatever the form it was stored in.

use prism_engine::graph::op::CollectiveKind;

/// Kinds of nodes, by the schema's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum NodeType {
    Invalid,
    Metadata,
    MemLoad,
    MemStore,
    Compute,
    Send,
    Receive,
    Collective,
    /// Storage, batches, checkpoints: later than the versions with public traces.
    Other,
}

impl NodeType {
    /// By number in `et_def.proto`.
    #[must_use]
    pub fn from_number(number: u64) -> Self {
        match number {
            0 => Self::Invalid,
            1 => Self::Metadata,
            2 => Self::MemLoad,
            3 => Self::MemStore,
            4 => Self::Compute,
            5 => Self::Send,
            6 => Self::Receive,
            7 => Self::Collective,
            _ => Self::Other,
        }
    }
}

/// A node. What is not told is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Number in its file.
    pub id: u64,
    /// Name.
    pub name: String,
    /// Kind, by the schema's number.
    pub node_type: u64,
    /// Nodes that come before, of control and of data.
    pub dependencies: Vec<u64>,
    /// Start, ns.
    pub start: i64,
    /// Duration, ns.
    pub duration: i64,
    /// Is it the host's?
    pub is_cpu: Option<bool>,
    /// Kind of collective, by the schema's number.
    pub comm_type: Option<u64>,
    /// Bytes that go in.
    pub comm_size: Option<u64>,
    /// Sender of a message.
    pub source: Option<u32>,
    /// Receiver of a message.
    pub destination: Option<u32>,
    /// Process group.
    pub group: Option<String>,
    /// Root of a collective.
    pub root: Option<u32>,
    /// Stream.
    pub stream: Option<u32>,
    /// Does a send hold up those that depend on it until it is through?
    pub is_blocking: bool,
}

impl Node {
    /// Takes an attribute; those that do not matter are passed over.
    pub fn set(&mut self, name: &str, value: Attribute) {
        let number = || match &value {
            Attribute::Number(number) => u64::try_from(*number).ok(),
            Attribute::Text(text) => text.trim().parse().ok(),
        };
        let small = || number().and_then(|number| u32::try_from(number).ok());
        match name {
            "is_cpu_op" => self.is_cpu = number().map(|number| number != 0),
            "comm_type" => self.comm_type = number(),
            "comm_size" => self.comm_size = number(),
            "comm_src" => self.source = small(),
            "comm_dst" => self.destination = small(),
            "root" | "root_rank" | "comm_root" => self.root = small(),
            "stream" => self.stream = small(),
            "is_blocking" => self.is_blocking = number().is_some_and(|number| number != 0),
            "duration_ns" => self.duration = number().and_then(|ns| i64::try_from(ns).ok()).unwrap_or(self.duration),
            "pg_name" | "comm_group" | "comm_id" => {
                self.group = Some(match value {
                    Attribute::Number(number) => number.to_string(),
                    Attribute::Text(text) => text,
                });
            }
            _ => {}
        }
    }
}

/// An attribute's value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Attribute {
    Number(i128),
    Text(String),
}

/// Collectives by the schema's numbers (`CollectiveCommType`).
const COLLECTIVES: [CollectiveKind; 10] = [
    CollectiveKind::AllReduce,
    CollectiveKind::Reduce,
    CollectiveKind::AllGather,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
    CollectiveKind::Broadcast,
    CollectiveKind::AllToAll,
    CollectiveKind::ReduceScatter,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllReduce,
];

/// The collective with this number in the schema.
#[must_use]
pub fn collective(number: u64) -> Option<CollectiveKind> {
    COLLECTIVES.get(usize::try_from(number).ok()?).copied()
}

/// The number of a collective in the schema.
#[must_use]
pub fn collective_number(kind: CollectiveKind) -> u64 {
    COLLECTIVES.iter().position(|known| *known == kind).map_or(0, |number| number as u64)
}
