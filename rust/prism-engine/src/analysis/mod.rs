//! What a job's replay means: why it hangs, or where the time of an iteration goes and who is to blame.
//!
//! ```text
//!  Graph ──► JobTrace::record ──► critical_path   the chain of work that makes the iteration as long as it is
//!     │             │        └──► account         where one rank's time goes
//!     │             ├───────────► waiting         who waits for whom; the culprit waits least
//!     │             ├───────────► slack           what could be later at no cost
//!     │             └───────────► Overview        every rank over time, in one picture
//!     ├─────────────────────────► MemoryReport    what every rank needs of its card
//!     ├─────────────────────────► sensitivities   what would change the iteration time, by replaying it
//!     └── SimError ─────────────► Hang            why nothing can move
//! ```
//! [`diagnose`] does all of it, the culprit first. Everything is exact, perturbed or not, for a network without contention
//! (slack takes the rules in force as fixed); other jobs are refused by name.

mod blame;
mod critical_path;
mod diagnosis;
mod excess;
mod hang;
mod messages;
mod need;
mod overview;
mod places;
mod plan;
mod sensitivity;
mod slack;
mod trace;
mod visit;

pub use blame::{Blame, Cause, CommWaiting, Culprit, Waiting};
pub use critical_path::{Path, Segment, Spent};
pub use diagnosis::{
    Account, CriticalPath, DiagnoseOptions, Diagnosis, LongSegment, Part, RankShare, SlackReport, diagnose,
};
pub use excess::{Excess, Named};
pub use hang::{Hang, HangKind};
pub use need::MemoryNeed;
pub use overview::{
    CommCost, LateRank, MemoryGroup, MemoryReport, Overview, OverviewOptions, Ranges, RankMap, Stretch, Totals,
};
pub use sensitivity::{LATENCY_STEP, Parameter, STEP, Sensitivity, sensitivities};
pub use slack::{MAX_MOMENTS, RankSlack, Slack};
pub use trace::{JobTrace, MAX_LAUNCHES};
pub use visit::{LaunchView, NodeView};
