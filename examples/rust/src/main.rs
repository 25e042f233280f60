//! A session in Rust, with the stubs that build.rs makes of protos/ and nothing else of kvplane.

use std::{env, error::Error, time::Duration};

use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use pb::execute_request::Message as Request;
use pb::execute_response::Message as Answer;
use pb::execution_service_client::ExecutionServiceClient;
use pb::operation::Operation;
use pb::pool_service_client::PoolServiceClient;
use pb::session_service_client::SessionServiceClient;

mod pb {
    tonic::include_proto!("kvplane.v1");
}

const UNEXPECTED: &str = "the data plane has answered another request";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let address = env::args().nth(1).ok_or("usage: session HOST:PORT")?;
    timeout(Duration::from_secs(10), attend(&address)).await?
}

async fn attend(address: &str) -> Result<()> {
    let plane = dial(address).await?;
    let mut pools = PoolServiceClient::new(plane.clone());
    let mut control = SessionServiceClient::new(plane);
    let pool_id = String::from("default");
    let pool = pools.get_pool(pb::GetPoolRequest { pool_id: pool_id.clone() }).await?.into_inner();
    let pb::Layout { fingerprint, groups, .. } = pool.layout.ok_or("the pool has no layout")?;
    let layout = Some(pb::Layout { fingerprint, ..Default::default() });
    let request = pb::OpenSessionRequest { pool_id, layout, ..Default::default() };
    let opened = control.open_session(request).await?.into_inner();
    let session = opened.session;
    let step = |number, operation, receipts| pb::StepRequest {
        session: session.clone(),
        number,
        operations: vec![pb::Operation { operation: Some(operation) }],
        receipts,
        ..Default::default()
    };
    let admit = pb::Admit { sequence_id: 1, token_ids: vec![97, 98, 99], ..Default::default() };
    let planned = control.step(step(1, Operation::Admit(admit), vec![])).await?.into_inner();

    let mut execution = Execution::open(&opened.shards[0].address, opened.grant).await?;
    let Answer::Opened(held) = execution.receive().await? else { return Err(UNEXPECTED.into()) };
    let plan = pb::StartPlanRequest { plan: planned.plan, ..Default::default() };
    let Answer::Started(started) = execution.ask(Request::Plan(plan)).await? else {
        return Err(UNEXPECTED.into());
    };
    let qkv = Some(zeros(started.num_tokens, &groups[0]));
    let mut receipt = None; // comes with the last layer
    for layer in held.layers {
        let input = pb::RunLayerRequest {
            layer,
            plan_number: started.plan_number,
            query: qkv.clone(),
            key: qkv.clone(),
            value: qkv.clone(),
            ..Default::default()
        };
        let Answer::Output(answer) = execution.ask(Request::Layer(input)).await? else {
            return Err(UNEXPECTED.into());
        };
        let output = answer.output.ok_or("no output")?;
        println!("layer {layer}: attention {:?}", output.shape);
        receipt = answer.receipt;
    }

    let free = pb::Free { sequence_ids: vec![1] };
    control.step(step(2, Operation::Free(free), receipt.into_iter().collect())).await?;
    control.close_session(pb::CloseSessionRequest { session }).await?;
    Ok(())
}

async fn dial(address: &str) -> Result<Channel> {
    Ok(Endpoint::new(format!("http://{address}"))?.connect().await?)
}

/// A stream to a data plane, which answers each request once and in order.
struct Execution {
    requests: mpsc::Sender<pb::ExecuteRequest>,
    answers: Streaming<pb::ExecuteResponse>,
}

impl Execution {
    async fn open(address: &str, grant: Option<pb::SignedPayload>) -> Result<Self> {
        let (requests, received) = mpsc::channel(1);
        let open = Request::Open(pb::OpenExecution { grant, ..Default::default() });
        // Sent first: the call returns with the headers, which may come with the first answer.
        requests.send(pb::ExecuteRequest { message: Some(open) }).await?;
        let mut data = ExecutionServiceClient::new(dial(address).await?);
        let answers = data.execute(ReceiverStream::new(received)).await?.into_inner();
        Ok(Self { requests, answers })
    }

    async fn ask(&mut self, request: Request) -> Result<Answer> {
        self.requests.send(pb::ExecuteRequest { message: Some(request) }).await?;
        self.receive().await
    }

    async fn receive(&mut self) -> Result<Answer> {
        match self.answers.message().await?.and_then(|answer| answer.message) {
            Some(Answer::Error(failure)) => Err(format!("{failure:?}").into()),
            Some(answer) => Ok(answer),
            None => Err("the data plane has ended the stream".into()),
        }
    }
}

fn zeros(num_tokens: i32, group: &pb::LayerGroup) -> pb::Tensor {
    let shape = [num_tokens, group.num_kv_heads, group.head_size].map(i64::from);
    let num_bytes = 4 * shape.iter().product::<i64>() as usize;
    let storage = Some(pb::tensor::Storage::Data(vec![0; num_bytes]));
    pb::Tensor { dtype: pb::ElementType::Float32.into(), shape: shape.into(), storage }
}
