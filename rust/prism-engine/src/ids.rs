//! Newtypes for the numbers that name things, so that a rank is never taken for a communicator.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// As an index into a table.
            #[must_use]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Global rank: index of one process in the target job.
    Rank(u32)
);
id!(
    /// Communicator of the execution graph.
    CommId(u32)
);
id!(
    /// Op program shared by all ranks of one role.
    TemplateId(u32)
);
id!(
    /// Stream of one rank, dense from 0.
    StreamId(u32)
);
id!(
    /// Event of one rank, dense from 0.
    EventId(u32)
);
id!(
    /// A rank's own number of a communicator, in order of creation; the rank's slot table maps it to a [`CommId`].
    SlotId(u32)
);
id!(
    /// Interned kernel or operator name.
    NameId(u32)
);
