// A session in Go, with the stubs that protoc makes of protos/ and nothing else of kvplane.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	pb "kvplane/v1"

	"google.golang.org/grpc"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	plane := must(grpc.Dial(os.Args[1], grpc.WithInsecure()))
	control := pb.NewSessionServiceClient(plane)
	pool := must(pb.NewPoolServiceClient(plane).GetPool(ctx, &pb.GetPoolRequest{PoolId: "default"}))
	opened := must(control.OpenSession(ctx, &pb.OpenSessionRequest{
		PoolId: "default", Layout: &pb.Layout{Fingerprint: pool.Layout.Fingerprint}}))
	admit := &pb.Operation_Admit{Admit: &pb.Admit{SequenceId: 1, TokenIds: []int32{97, 98, 99}}}
	planned := must(control.Step(ctx, &pb.StepRequest{
		Session: opened.Session, Number: 1, Operations: []*pb.Operation{{Operation: admit}}}))

	data := must(grpc.Dial(opened.Shards[0].Address, grpc.WithInsecure()))
	stream := must(pb.NewExecutionServiceClient(data).Execute(ctx))
	ask := func(request *pb.ExecuteRequest) *pb.ExecuteResponse {
		check(stream.Send(request))
		answer := must(stream.Recv())
		if failure := answer.GetError(); failure != nil {
			log.Fatalf("%s: %s: %s", failure.Reason, failure.Field, failure.Message)
		}
		return answer
	}
	open := &pb.ExecuteRequest_Open{Open: &pb.OpenExecution{Grant: opened.Grant}}
	layers := ask(&pb.ExecuteRequest{Message: open}).GetOpened().Layers
	plan := &pb.ExecuteRequest_Plan{Plan: &pb.StartPlanRequest{Plan: planned.Plan}}
	started := ask(&pb.ExecuteRequest{Message: plan}).GetStarted()
	group := pool.Layout.Groups[0]
	shape := []int64{int64(started.NumTokens), int64(group.NumKvHeads), int64(group.HeadSize)}
	itemBytes := int64(2)
	if pool.Layout.Dtype == pb.ElementType_ELEMENT_TYPE_FLOAT32 {
		itemBytes = 4
	}
	zeros := &pb.Tensor_Data{Data: make([]byte, itemBytes*shape[0]*shape[1]*shape[2])}
	qkv := &pb.Tensor{Dtype: pool.Layout.Dtype, Shape: shape, Storage: zeros}
	var receipt *pb.SignedPayload // comes with the last layer
	for _, layer := range layers {
		input := &pb.ExecuteRequest_Layer{Layer: &pb.RunLayerRequest{
			Layer: layer, PlanNumber: started.PlanNumber, Query: qkv, Key: qkv, Value: qkv}}
		output := ask(&pb.ExecuteRequest{Message: input}).GetOutput()
		fmt.Printf("layer %d: attention %v\n", layer, output.Output.Shape)
		receipt = output.Receipt
	}

	free := &pb.Operation_Free{Free: &pb.Free{SequenceIds: []int64{1}}}
	must(control.Step(ctx, &pb.StepRequest{Session: opened.Session, Number: 2,
		Operations: []*pb.Operation{{Operation: free}}, Receipts: []*pb.SignedPayload{receipt}}))
	must(control.CloseSession(ctx, &pb.CloseSessionRequest{Session: opened.Session}))
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
