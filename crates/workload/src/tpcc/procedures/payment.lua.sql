CREATE OR REPLACE PROCEDURE tpcc_payment(
    w INTEGER, d INTEGER, cw INTEGER, cd INTEGER, c INTEGER, last_name TEXT, amount BIGINT)
RETURNS TABLE (
    customer_number INTEGER, first_name TEXT, customer_last_name TEXT, credit TEXT, discount INTEGER,
    balance_cents BIGINT, warehouse_name TEXT, district_name TEXT)
LANGUAGE lua AS $$
    if c == 0 then
        local rows = db.query("SELECT c_id FROM customer WHERE c_w_id = $1 AND c_d_id = $2 AND c_last = $3 \
            ORDER BY c_first", cw, cd, last_name)
        c = rows[(#rows + 1) // 2].c_id
    end
    local customer = db.query("UPDATE customer SET c_balance = c_balance - $4, \
        c_ytd_payment = c_ytd_payment + $4, c_payment_cnt = c_payment_cnt + 1 \
        WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3 \
        RETURNING c_credit, c_first, c_middle, c_last, c_street_1, c_street_2, c_city, c_state, c_zip, \
        c_phone, c_since, c_credit_lim, c_discount, c_balance", cw, cd, c, amount)[1]
    if customer.c_credit == "BC" then
        local note = table.concat({ c, cd, cw, d, w, amount }, " ") .. " | "
        db.exec("UPDATE customer SET c_data = substr($4 || c_data, 1, 500) \
            WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3", cw, cd, c, note)
    end
    local district = db.query("UPDATE district SET d_ytd = d_ytd + $3 WHERE d_w_id = $1 AND d_id = $2 \
        RETURNING d_name, d_street_1, d_street_2, d_city, d_state, d_zip", w, d, amount)[1]
    local warehouse = db.query("UPDATE warehouse SET w_ytd = w_ytd + $2 WHERE w_id = $1 \
        RETURNING w_name, w_street_1, w_street_2, w_city, w_state, w_zip", w, amount)[1]
    db.exec("INSERT INTO history (h_c_id, h_c_d_id, h_c_w_id, h_d_id, h_w_id, h_date, h_amount, h_data) \
        VALUES ($1, $2, $3, $4, $5, CURRENT_TIMESTAMP, $6, $7)",
        c, cd, cw, d, w, amount, warehouse.w_name .. "    " .. district.d_name)
    return {
        customer_number = c, first_name = customer.c_first, customer_last_name = customer.c_last,
        credit = customer.c_credit, discount = customer.c_discount, balance_cents = customer.c_balance,
        warehouse_name = warehouse.w_name, district_name = district.d_name,
    }
$$
