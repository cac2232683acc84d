//! Mixtures of experts: layers whose feed-forward block is many small ones, of which each token chooses a few
//! (Shazeer et al., arXiv 1701.06538).

use serde::{Deserialize, Serialize};

/// The experts of a model's layers. No token is dropped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Experts of a layer.
    pub count: u32,
    /// Experts that each token chooses.
    pub per_token: u32,
    /// Width inside an expert.
    pub intermediate: u32,
    /// The function from a token's logits to its experts and their weights.
    #[serde(default)]
    pub router: Router,
    /// Whether logits are computed in f32 also where passes are in bf16.
    #[serde(default)]
    pub wide_router: bool,
    /// Whether a bias for each expert of a layer is added to its share where a token chooses, and nowhere else.
    /// [`Balance::Bias`] adds such biases too and moves them; without it they stay as they are.
    #[serde(default)]
    pub biased: bool,
    /// Whether the weights of the chosen experts are divided by their sum.
    #[serde(default = "yes")]
    pub renormalise: bool,
    /// Factor on these weights.
    #[serde(default = "one")]
    pub scale: f64,
    /// Groups of experts, of which a token chooses some first; `None` has it choose from all.
    #[serde(default)]
    pub groups: Option<ExpertGroups>,
    /// Width inside an expert that every token has besides; `None` has no such expert.
    #[serde(default)]
    pub shared_intermediate: Option<u32>,
    /// Whether the output of that expert is multiplied by the sigmoid of one more product.
    #[serde(default = "yes")]
    pub shared_gated: bool,
    /// The layers without experts, by number from 0, in ascending order.
    #[serde(default)]
    pub dense_layers: Vec<u32>,
    /// What keeps the experts equally busy.
    #[serde(default)]
    pub balance: Balance,
    /// What each bias moves by after a step, with [`Balance::Bias`].
    #[serde(default = "default_balance_rate")]
    pub balance_rate: f64,
    /// Factor on the loss of [`Balance::Loss`].
    #[serde(default = "default_balance_coefficient")]
    pub balance_coefficient: f64,
}

impl Experts {
    /// [`Self::balance_rate`] where a run names none: that of DeepSeek-V3.
    pub const BALANCE_RATE: f64 = 0.001;
    /// [`Self::balance_coefficient`] where a run names none: that of the Switch Transformer.
    pub const BALANCE_COEFFICIENT: f64 = 0.01;

    /// Experts as a run has them that says nothing else of them.
    #[must_use]
    pub const fn new(count: u32, per_token: u32, intermediate: u32) -> Self {
        Self {
            count,
            per_token,
            intermediate,
            router: Router::Softmax,
            wide_router: false,
            biased: false,
            renormalise: true,
            scale: 1.0,
            groups: None,
            shared_intermediate: None,
            shared_gated: true,
            dense_layers: Vec::new(),
            balance: Balance::None,
            balance_rate: Self::BALANCE_RATE,
            balance_coefficient: Self::BALANCE_COEFFICIENT,
        }
    }

    /// Whether a layer has a bias for each expert, which moves or not.
    #[must_use]
    pub fn has_biases(&self) -> bool {
        self.biased || self.balance == Balance::Bias
    }
}

fn default_balance_rate() -> f64 {
    Experts::BALANCE_RATE
}

fn default_balance_coefficient() -> f64 {
    Experts::BALANCE_COEFFICIENT
}

fn yes() -> bool {
    true
}

fn one() -> f64 {
    1.0
}

/// Equal groups of adjacent experts (DeepSeek-AI, arXiv 2405.04434).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// Groups of a layer.
    pub count: u32,
    /// Groups from which a token chooses its experts: those with the best ones, of equal groups the one with the lower
    /// number. With [`Router::Sigmoid`] a group counts by the sum of its best two.
    pub chosen: u32,
}

/// The function from a token's logits to its experts and their weights.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum Router {
    /// The largest of the softmax over all experts, in f32; of equal ones the expert with the lower number.
    #[default]
    Softmax,
    /// The largest of the sigmoid of each, in f32 (DeepSeek-AI, arXiv 2412.19437).
    Sigmoid,
}

/// What keeps the experts equally busy.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum Balance {
    /// Nothing: the loss alone.
    #[default]
    None,
    /// A bias for each expert of a layer, added to its share where a token chooses, and nowhere else. After
    /// each step it goes up where fewer tokens than the mean chose the expert, and down where more did (Wang et al.,
    /// arXiv 2408.15664; DeepSeek-AI, arXiv 2412.19437).
    Bias,
    /// An auxiliary loss, the mean over the layers with experts (Lepikhin et al., arXiv 2006.16668; Fedus et al., arXiv
    /// 2101.03961). Of a layer and a microbatch it is the number of experts times the sum, over experts, of the share of tokens
    /// that chose the expert times its mean share of the softmax.
    Loss,
}
